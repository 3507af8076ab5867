"""Predicts a rank's memory. The formulas are in the callbacks' cards; `tests/callbacks` checks most of them on real
ranks.
"""

from trainer.cost.setup import Held, Setup


def predict_memory(setup: Setup) -> float:
    """Return a rank's peak bytes during a step, without the overhead of torch and of kernels."""
    return sum(held(setup)) + activations(setup)


def held(setup: Setup) -> Held:
    """Return the bytes that a rank holds throughout: those of DDP, as changed by each callback."""
    size, buckets = setup.gradient_bytes, setup.gradient_bytes * (setup.data_ranks > 1 and setup.copies)
    found = Held(size, size, buckets, setup.optimizer_bytes * setup.stepped)
    for cost in setup.costs.values():
        found = cost.hold(setup, found)
        residuals = cost.codec.residual_copies if cost.codec and setup.data_ranks > 1 else 0.0
        found = found._replace(other=found.other + (cost.copies + residuals) * size)
    return found


def activations(setup: Setup) -> float:
    """Return the bytes that autograd saves for all micro-batches in flight."""
    in_flight = max((cost.in_flight(setup) for cost in setup.costs.values()), default=1)
    return setup.workload.activation_bytes * setup.micro * setup.keeps * in_flight / setup.stages
