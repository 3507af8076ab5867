"""Divides the CPU cores of a node among its ranks: each rank gets cores near its GPU, and no core is shared."""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

UNKNOWN = -1  # as Linux has it


class Neighbour(NamedTuple):
    """A rank of this node, as it describes itself to the others."""

    cores: list[int]  # cores that its process may use
    near: int | None  # the NUMA node of its GPU, or UNKNOWN; None: it has no GPU


class Binding(NamedTuple):
    cores: frozenset[int] | None  # for this rank; None: leave the binding unchanged
    reason: str


def parse_cores(text: str) -> list[int]:
    """Parse Linux's list format: "0-2,8" -> [0, 1, 2, 8]."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]


def numa_nodes(sys: Path) -> dict[int, list[int]]:
    """Return the cores of each NUMA node that has cores; empty if unknown."""
    files = (sys / "devices" / "system" / "node").glob("node[0-9]*/cpulist")
    nodes = {int(file.parent.name.removeprefix("node")): parse_cores(file.read_text()) for file in files}
    return {node: nodes[node] for node in sorted(nodes) if nodes[node]}


def numa_node_of(sys: Path, pci_address: str) -> int:
    """Return the NUMA node of a PCI device, as "0000:3b:00.0"; UNKNOWN if the firmware does not report it."""
    with contextlib.suppress(OSError, ValueError):
        return int((sys / "bus" / "pci" / "devices" / pci_address / "numa_node").read_text())
    return UNKNOWN


def physical_cores(sys: Path, cores: Sequence[int]) -> list[list[int]]:
    """Group hardware threads by physical core, ordered by the first thread of each."""
    groups: dict[int, list[int]] = {}
    for core in sorted(cores):
        first = core
        with contextlib.suppress(OSError, ValueError):
            file = sys / "devices" / "system" / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list"
            first = min(parse_cores(file.read_text()))
        groups.setdefault(first, []).append(core)
    return [groups[first] for first in sorted(groups)]


def divide(own: int, neighbours: Sequence[Neighbour], nodes: Mapping[int, Sequence[int]], sys: Path) -> Binding:
    """Choose the cores for the rank at index `own` of this node's ranks. All ranks compute the same division.

    A rank gets cores of its GPU's NUMA node; ranks without a GPU are spread evenly over the nodes, in order. Ranks of
    one NUMA node share its physical cores evenly.
    """
    sets = [set(neighbour.cores) for neighbour in neighbours]
    together = set().union(*sets)
    if len(sets) > 1 and len(together) == sum(map(len, sets)):
        return Binding(None, f"the launcher has given each rank its own cores: {len(sets[own])} for this one")
    usable = {node: sorted(together & set(cores)) for node, cores in nodes.items() if together & set(cores)}
    if len(usable) < 2:
        return Binding(None, "the cores are of one NUMA node, so nothing is bound")
    if any(cores != sets[0] for cores in sets):
        return Binding(None, "ranks may use different cores, some of them the same, so nothing is bound")
    if any(neighbour.near == UNKNOWN for neighbour in neighbours):
        return Binding(None, "the NUMA node of a GPU is unknown, so nothing is bound")
    order = list(usable)
    spread = [order[i * len(order) // len(neighbours)] for i in range(len(neighbours))]
    homes = [n.near if n.near in usable else spread[i] for i, n in enumerate(neighbours)]
    mates = [i for i, home in enumerate(homes) if home == homes[own]]
    cores = physical_cores(sys, usable[homes[own]])
    if len(cores) < len(mates):
        few = f"NUMA node {homes[own]} has {len(cores)} core(s) for {len(mates)} ranks"
        return Binding(None, f"{few}, so none of them is bound")
    place, count = mates.index(own), len(mates)
    part = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
    chosen = frozenset(core for group in part for core in group)
    return Binding(chosen, f"bound to {len(chosen)} core(s) of NUMA node {homes[own]}: {ranges(chosen)}")


def ranges(numbers: Collection[int]) -> str:
    """Format numbers in Linux's list format: {0, 1, 2, 8} -> "0-2,8"."""
    known = set(numbers)
    starts = sorted(number for number in known if number - 1 not in known)
    ends = sorted(number for number in known if number + 1 not in known)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def bind_process(cores: frozenset[int]) -> None:
    """Bind all threads of this process. Later threads and processes inherit the binding."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.sched_setaffinity(int(thread), cores)
