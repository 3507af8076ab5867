"""The tables and goals of the run on one GPU."""

from collections.abc import Callable, Mapping, Sequence

from scripts.bench.harness import Goal, Row, at_least, at_most
from scripts.bench.one_gpu.cells import LARGE, PEERS, TINY, Cell, Rung

TITLES = {
    "tests": "the tests that failed on 2026-11-26",
    "turns": "eager steps of Echelon and of a bare loop, in turns in one process; noise: the bare loop against itself",
    "speed": "training steps; tokens/s of one GPU, MFU of the peak in bf16, peak memory of tensors",
    "kernels": "the device's time of a step, by kind of kernel",
    "snapshot": "a checkpoint during training: by how much it delays steps until it is written",
    "images": "synthetic uint8 images from data workers to the device, from tar shards or from a memory map",
}
Measured = Mapping[Cell, Mapping[str, float]]


def tables(measured: Measured, rungs: Sequence[Rung] = ()) -> list[list[Row]]:
    found = {kind: [cell for cell in measured if cell.kind == kind] for kind in TITLES}
    made = [[row for cell in cells for row in ROWS[kind](cell, measured)] for kind, cells in found.items() if cells]
    climbed = [rung_row(rung, measured) for rung in rungs if rung.cell in measured]
    return [*made, climbed] if climbed else made


def title(cell: Cell) -> str:
    return f"{TITLES[cell.kind]}; {cell.size.layers} layers, hidden {cell.size.hidden}"


def settings(cell: Cell) -> Row:
    part = f"{title(cell)}; {cell.timed} steps after {cell.warm}"
    return {"part": part, "trainer": cell.trainer, "sequence": cell.sequence, "micro_batch": cell.micro}


def tests_row(cell: Cell, measured: Measured) -> list[Row]:
    return [{"part": TITLES["tests"], **{word: int(count) for word, count in measured[cell].items()}}]


def turns_row(cell: Cell, measured: Measured) -> list[Row]:
    size = {"layers": cell.size.layers, "hidden": cell.size.hidden}
    own = {"sequence": cell.sequence, "micro_batch": cell.micro, "precision": cell.precision}
    return [{"part": TITLES["turns"], **size, **own, **measured[cell]}]


def speed_row(cell: Cell, measured: Measured) -> list[Row]:
    found = measured[cell]
    more = {"precision": cell.precision, "compiled": cell.compiled, "recompute": cell.recompute, "chunks": cell.chunks}
    numbers = {key: found.get(key, "unknown") for key in ("ms a step", "tokens/s", "MFU", "peak GiB")}
    return [{**settings(cell), **more, "documents": "apart" if cell.documents else "across", **numbers}]


def snapshot_row(cell: Cell, measured: Measured) -> list[Row]:
    return [{**settings(cell), "precision": cell.precision, **measured[cell]}]


def kernels_row(cell: Cell, measured: Measured) -> list[Row]:
    found, total = measured[cell], sum(measured[cell].values())
    part = f"{TITLES['kernels']}; {str(cell).partition(', ')[2]}"
    ordered = sorted(found, key=lambda kind: -found[kind])
    return [{"part": part, "kernels": kind, "ms a step": found[kind], "share": found[kind] / total} for kind in ordered]


def images_row(cell: Cell, measured: Measured) -> list[Row]:
    found = measured[cell]
    counts = {"side": int(found["side"]), "batch": cell.micro, "workers": int(found["workers"])}
    rates = {key: found[key] for key in ("images/s", "GB/s")}
    source = "tar shards" if cell.trainer == "Echelon" else "memory map, torch's DataLoader"
    part = f"{TITLES['images']}; {cell.timed} steps after {cell.warm}"
    return [{"part": part, "trainer": cell.trainer, "source": source, **counts, **rates}]


ROWS: dict[str, Callable[[Cell, Measured], list[Row]]] = {
    "tests": tests_row,
    "turns": turns_row,
    "speed": speed_row,
    "kernels": kernels_row,
    "snapshot": snapshot_row,
    "images": images_row,
}


def rung_row(rung: Rung, measured: Measured) -> Row:
    """Compare a rung with the cell to which it adds one setting."""
    found, below = measured[rung.cell], measured.get(rung.on, {}) if rung.on else {}
    numbers = {key: found.get(key, "unknown") for key in ("ms a step", "tokens/s", "MFU")}
    known = "MFU" in found and "MFU" in below
    return {
        "part": f"the ladder to an MFU of 0.55; each rung adds to another one; sequence {rung.cell.sequence}",
        "rung": rung.name, "adds to": "-" if rung.on is None else str(rung.on).partition(", ")[2], **numbers,
        "MFU added": found["MFU"] - below["MFU"] if known else "unknown",
        "times tokens/s": found["tokens/s"] / below["tokens/s"] if below else "unknown",
    }  # fmt: skip


def goals(measured: Measured) -> list[Goal]:
    best: dict[str, float] = {}  # tokens/s of each trainer at its best setting, on the longer sequences
    utilisation: list[float] = []
    longest = max((cell.sequence for cell in measured if cell.kind == "speed"), default=0)
    for cell, found in measured.items():
        if cell.kind != "speed" or cell.sequence != longest or cell.documents:
            continue
        best[cell.trainer] = max(best.get(cell.trainer, 0.0), found["tokens/s"])
        if cell.trainer == "Echelon" and "MFU" in found:
            utilisation.append(found["MFU"])
    reached: list[Goal] = []
    if "Echelon" in best and all(peer in best for peer in PEERS):
        ratio = best["Echelon"] / max(best[peer] for peer in PEERS)
        reached.append(at_least(f"tokens/s at sequence {longest}, times the faster peer at its best", 1.5, ratio))
    if utilisation:
        reached.append(at_least(f"MFU at sequence {longest}, at Echelon's best", 0.55, max(utilisation)))
    turns = [found["ratio"] for cell, found in measured.items() if cell.kind == "turns" and cell.size in (LARGE, TINY)]
    if turns:
        reached.append(at_most("an eager step, times the bare loop", 1.02, turns[0]))
    return reached
