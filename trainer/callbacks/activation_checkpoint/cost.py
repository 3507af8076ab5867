"""The cost of recomputed blocks, and the activations that stay, as the card measures them."""

from trainer.cost.setup import Cost

RECOMPUTED = {"full": 1.0, "selective": 0.1, "offload": 0.0}  # of a block; selective: norms and activations
KEPT = {"full": 0.1, "selective": 0.63, "offload": 0.05}  # of a block's activations


def cost_of(policy: str, every: int, budget: float | None) -> Cost:
    """Return the cost of the callback's knobs."""
    if budget is not None:
        return Cost(recomputes=1.0 - budget, keeps=budget)
    return Cost(recomputes=RECOMPUTED[policy] / every, keeps=1 - (1 - KEPT[policy]) / every)
