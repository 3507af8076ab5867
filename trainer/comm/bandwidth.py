"""The algorithm and bus bandwidth of collectives, as nccl-tests (doc/PERFORMANCE.md) defines them."""

import math
from collections.abc import Callable, Sequence

# Ratio of bus bandwidth to algorithm bandwidth, by the number of ranks: the bytes that a rank sends per byte of the
# collective. The size of an all-gather is its whole result; the size of a reduce-scatter is its whole input.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}

# Sequential messages in the algorithm that gloo and NCCL use for large collectives: a ring, and a tree for the
# broadcast (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
HOPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: math.ceil(math.log2(n)),
}


def bandwidths(collective: str, size: float, seconds: float, ranks: int) -> tuple[float, float]:
    """Return the algorithm bandwidth and the bus bandwidth of a collective of `size` bytes, in bytes per second.

    The bus bandwidth is the load on each link, so it can be compared with the hardware's rate for any number of ranks.
    """
    return size / seconds, size / seconds * BUS_FACTORS[collective](ranks)


def level_of(ranks: Sequence[int], per_node: int) -> str:
    """Return the level of a group: `inside` one node, `across` nodes with one rank on each, or `all`.

    Global ranks are numbered node by node, `per_node` on each.
    """
    nodes = {rank // per_node for rank in ranks}
    return "inside" if len(nodes) == 1 else "across" if len(nodes) == len(ranks) else "all"
