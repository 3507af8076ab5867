"""The bytes of a rank: parameters, gradients, optimizer state, activations, and what callbacks keep.

The cards of the callbacks have the formulas; `tests/callbacks` count most of them on real ranks.
"""

from trainer.cost.setup import Held, Setup


def predict_memory(setup: Setup) -> float:
    """Return the bytes of a rank at the peak of a step, without what torch and kernels take for themselves."""
    return sum(held(setup)) + activations(setup)


def held(setup: Setup) -> Held:
    """Return the bytes that a rank holds in every step: DDP's, changed by each callback."""
    size, buckets = setup.gradient_bytes, setup.gradient_bytes * (setup.data_ranks > 1 and setup.copies)
    found = Held(size, size, buckets, setup.optimizer_bytes * setup.stepped)
    for cost in setup.costs.values():
        found = cost.hold(setup, found)
        residuals = cost.codec.residual_copies if cost.codec and setup.data_ranks > 1 else 0.0
        found = found._replace(other=found.other + (cost.copies + residuals) * size)
    return found


def activations(setup: Setup) -> float:
    """Return the bytes that autograd keeps of the micro-batches that wait for their backward pass."""
    in_flight = max((cost.in_flight(setup) for cost in setup.costs.values()), default=1)
    return setup.workload.activation_bytes * setup.micro * setup.keeps * in_flight / setup.stages
