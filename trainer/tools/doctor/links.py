"""Finds how far apart devices are: by NVLink, or by the PCI bridges between them, as nvidia-smi's matrix names them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.process.affinity import UNKNOWN, numa_node_of

SWITCH = 2  # entries of a path below a PCIe switch: the port out of the switch, and the device

LEGEND = (
    "NV#: # NVLinks; PIX: one PCIe switch; PXB: several; PHB: the host bridge; NODE: host bridges of one NUMA node; "
    "SYS: between sockets"
)


def chain(sys: Path, address: str) -> list[str]:
    """Return the path of a PCI device: its root bus, bridges, and the device; empty if unknown."""
    parts = os.path.realpath(sys / "bus" / "pci" / "devices" / address).split(os.sep)
    roots = [i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[roots[-1] :] if roots else []


def distance(sys: Path, one: str, other: str) -> str:
    """Return the word of nvidia-smi's matrix for two PCI addresses; "?" if unknown."""
    first, second = chain(sys, one), chain(sys, other)
    if not first or not second:
        return "?"
    pairs = zip(first, second, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    if common > 1:  # below one bridge
        return "PIX" if max(len(first), len(second)) - common <= SWITCH else "PXB"
    if common == 1:
        return "PHB"
    nodes = {numa_node_of(sys, one), numa_node_of(sys, other)}
    return "NODE" if len(nodes) == 1 and UNKNOWN not in nodes else "SYS"


def matrix(
    sys: Path, devices: Mapping[str, str], nvlinks: Mapping[tuple[str, str], int], rows: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Return the word for each of `rows` with each device.

    Args:
        devices: Name -> PCI address.
        nvlinks: Number of NVLinks between two addresses.
    """
    found = dict[str, dict[str, str]]()
    for one in rows:
        found[one] = {}
        for other, address in devices.items():
            links = nvlinks.get((devices[one], address), 0)
            word = "X" if one == other else f"NV{links}" if links else distance(sys, devices[one], address)
            found[one][other] = word
    return found


def table(words: Mapping[str, Mapping[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in words.values() for name in row))
    rows = [["", *columns], *([name, *(row[column] for column in columns)] for name, row in words.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
