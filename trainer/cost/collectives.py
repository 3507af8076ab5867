"""The time of a collective: latency and bandwidth of a ring, a double tree and two levels.

With a latency of a for each round, b bytes a second and N ranks, a ring all-reduces n bytes in
`2 (N - 1) a + 2 (N - 1) / N n / b` seconds. Its second term is the least that any algorithm takes (Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").

Ring all-gather and reduce-scatter take half of both terms. The sources are Thakur et al. 2005, "Optimization of
collective communication operations in MPICH", and Chan et al. 2007, "Collective communication: theory, practice, and
experience".

Two trees that share the ranks take `2 log2(N)` rounds and have nearly full bandwidth. The source is Sanders et al.
2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from trainer.cost.machine import Machine
from trainer.cost.messages import Message


class Group(NamedTuple):
    """Ranks that reduce together: as many on each of `nodes` nodes."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


class Wire(NamedTuple):
    """Seconds on the wire, and the processor seconds of a rank meanwhile."""

    seconds: float = 0.0
    cpu_s: float = 0.0

    def alone_s(self, cores: float) -> float:
        """Return the seconds if a rank only waits: its `cores` may be what limits it."""
        return max(self.seconds, self.cpu_s / cores)


def of_ranks(ranks: int, machine: Machine) -> Group:
    """Return the group of neighbouring ranks; the last node counts as full."""
    per_node = min(ranks, machine.ranks_per_node)
    return Group(-(-ranks // per_node), per_node)


def time(message: Message, group: Group, machine: Machine, algorithm: str = "ring", library: bool = False) -> Wire:
    """Return the time of a collective. Each part of the tensor passes the hops of a ring in sequence.

    Args:
        algorithm: "ring" or "tree", of an all_reduce.
        library: The all_gather or reduce_scatter is the library's own, with the share of the rate that was measured.
            Codecs and owners exchange their messages from rank to rank, at the whole rate.
    """
    if group.ranks < 2 or not message.size:
        return Wire()
    slow = machine.across if group.nodes > 1 else machine.inside
    sent = message.sent(group.ranks)
    passes = 2 if message.collective == "all_reduce" else 1
    hops_s = group.nodes * machine.across.latency_s + (group.ranks - group.nodes) * machine.inside.latency_s
    latency_s = passes * (group.ranks - 1) / group.ranks * (hops_s if group.nodes > 1 else group.ranks * slow.latency_s)
    if algorithm == "tree" and message.collective == "all_reduce":
        inside_s = (group.per_node - 1) * machine.inside.latency_s
        latency_s = 2 * (math.log2(group.nodes) * machine.across.latency_s + inside_s)
    shares = {"all_gather": slow.all_gather, "reduce_scatter": slow.reduce_scatter}
    rate = bandwidth(message.collective, group, machine) * (shares.get(message.collective, 1.0) if library else 1.0)
    return Wire(latency_s + sent / rate, 2 * sent * slow.cpu_s_per_byte)


def bandwidth(collective: str, group: Group, machine: Machine) -> float:
    """Return the bytes that a rank sends in a second.

    A ring crosses each node's boundary once, so it gets the `across` bandwidth of all ranks of the node together. This
    is true of one ring on a shared interface, and of NCCL's rings, one per network card. In an all-to-all each rank
    gets only its own share.
    """
    if group.nodes == 1:
        return machine.inside.bytes_per_s
    if group.per_node == 1:
        return machine.across.bytes_per_s
    borders = group.per_node if collective != "all_to_all" else (group.ranks - 1) / (group.ranks - group.per_node)
    return min(machine.inside.bytes_per_s, borders * machine.across.bytes_per_s)


def two_levels(size: float, group: Group, machine: Machine, across: list[Message], algorithm: str = "ring") -> Wire:
    """Return the time of `hierarchical`: reduce-scatter on a node, `across` between nodes, all-gather on the node."""
    inside, between = Group(1, group.per_node), Group(group.nodes, 1)
    steps = [time(Message(name, size), inside, machine, library=True) for name in ("reduce_scatter", "all_gather")]
    steps += [time(message, between, machine, algorithm) for message in across]
    return add(steps)


def add(wires: Iterable[Wire]) -> Wire:
    """Return the total time of sequential collectives."""
    each = list(wires)
    return Wire(sum(wire.seconds for wire in each), sum(wire.cpu_s for wire in each))
