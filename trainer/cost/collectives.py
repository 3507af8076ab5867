"""The time of a collective, from latency and bandwidth: ring, double tree, and two levels.

With latency a per round, bandwidth b and N ranks, a ring all-reduces n bytes in `2 (N - 1) a + 2 (N - 1) / N n / b`
seconds. The second term is a lower bound for every algorithm (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations"). A ring all-gather or reduce-scatter takes half of both terms (Thakur et al.
2005; Chan et al. 2007). A double tree takes `2 log2(N)` rounds at nearly full bandwidth (Sanders et al. 2009, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan").
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from trainer.cost.machine import Machine
from trainer.cost.messages import Message


class Group(NamedTuple):
    """Ranks that reduce together, with equally many on each of `nodes` nodes."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


class Wire(NamedTuple):
    """Seconds on the wire, and CPU seconds that a rank spends on it."""

    seconds: float = 0.0
    cpu_s: float = 0.0

    def alone_s(self, cores: float) -> float:
        """Return the seconds if nothing overlaps, in which case the rank's `cores` may be the bottleneck."""
        return max(self.seconds, self.cpu_s / cores)


def of_ranks(ranks: int, machine: Machine) -> Group:
    """Return the group of `ranks` neighbours; the last node counts as full."""
    per_node = min(ranks, machine.ranks_per_node)
    return Group(-(-ranks // per_node), per_node)


def time(message: Message, group: Group, machine: Machine, algorithm: str = "ring", library: bool = False) -> Wire:
    """Return the time of a collective.

    `library` uses the measured rates of the library's own all_gather and reduce_scatter. Codecs and owners exchange
    messages rank by rank instead, at the full rate.
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
    """Return the bytes per second that a rank sends.

    A ring crosses each node's boundary once, so it has the `across` bandwidth of all the node's ranks together. This
    holds for one ring on a shared interface, and for NCCL's rings with one network card each. In an all-to-all, each
    rank has only its own share.
    """
    if group.nodes == 1:
        return machine.inside.bytes_per_s
    if group.per_node == 1:
        return machine.across.bytes_per_s
    borders = group.per_node if collective != "all_to_all" else (group.ranks - 1) / (group.ranks - group.per_node)
    return min(machine.inside.bytes_per_s, borders * machine.across.bytes_per_s)


def two_levels(size: float, group: Group, machine: Machine, across: list[Message], algorithm: str = "ring") -> Wire:
    """Return the time of a reduce-scatter on each node, `across` between nodes, and an all-gather on each node."""
    inside, between = Group(1, group.per_node), Group(group.nodes, 1)
    steps = [time(Message(name, size), inside, machine, library=True) for name in ("reduce_scatter", "all_gather")]
    steps += [time(message, between, machine, algorithm) for message in across]
    return add(steps)


def add(wires: Iterable[Wire]) -> Wire:
    wires = list(wires)
    return Wire(sum(wire.seconds for wire in wires), sum(wire.cpu_s for wire in wires))
