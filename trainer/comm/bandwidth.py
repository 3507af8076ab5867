"""Computes the algorithm and bus bandwidth of collectives, as nccl-tests (doc/PERFORMANCE.md) defines them."""

import math
from collections.abc import Callable, Sequence

# Bus bandwidth over algorithm bandwidth, by the number of ranks: the bytes that a rank sends for each byte of the
# collective. The bytes are those of the whole result of an all-gather, and of the whole input of a reduce-scatter.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}

# Messages of a collective, one after another, in the algorithm that gloo and NCCL have for long ones: a ring; and a
# tree for the broadcast (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
HOPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: math.ceil(math.log2(n)),
}


def bandwidths(collective: str, size: float, seconds: float, ranks: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth, in bytes a second, of a collective of `size` bytes.

    The bus bandwidth is what each link carries, so it compares with the rate of the hardware for any number of ranks.
    """
    return size / seconds, size / seconds * BUS_FACTORS[collective](ranks)


def level_of(ranks: Sequence[int], per_node: int) -> str:
    """Return the level of a group: `inside` a node, `across` nodes with one rank of each, or `all`, which is both.

    Args:
        ranks: The global ranks of the group, which are numbered node by node.
        per_node: Ranks on each node.
    """
    nodes = {rank // per_node for rank in ranks}
    return "inside" if len(nodes) == 1 else "across" if len(nodes) == len(ranks) else "all"
