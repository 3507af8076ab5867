"""The tables of the bench, its goals, and the cells without numbers."""

from collections.abc import Callable, Mapping

from scripts.bench.harness import Goal, Row, at_least, at_most
from scripts.bench.one_gpu.cells import PEERS, Cell

TITLES = {
    "speed": "training steps; tokens/s of one GPU, MFU of the peak in bf16, peak memory of tensors",
    "launches": "host: steps of 1 sample whose kernels have next to no work",
    "snapshot": "a checkpoint during training: by how much it delays steps until it is written",
    "kernels": "the device's time of a step, by kind of kernel",
}
Measured = Mapping[Cell, Mapping[str, float]]


def tables(measured: Measured) -> list[list[Row]]:
    found = {part: [cell for cell in measured if cell.part == part] for part in TITLES}
    return [[row for cell in cells for row in ROWS[part](cell, measured)] for part, cells in found.items() if cells]


def settings(cell: Cell) -> Row:
    sizes = f"{cell.size.layers} layers, hidden {cell.size.hidden}"
    title = f"{TITLES[cell.part]}; {sizes}; {cell.timed} steps after {cell.warm}"
    return {"part": title, "trainer": cell.trainer, "sequence": cell.sequence, "micro_batch": cell.micro}


def speed_row(cell: Cell, measured: Measured) -> list[Row]:
    found = measured[cell]
    more = {"precision": cell.precision, "compiled": cell.compiled, "recompute": cell.recompute}
    numbers = {key: found.get(key, "unknown") for key in ("ms a step", "tokens/s", "MFU", "peak GiB")}
    return [{**settings(cell), **more, "documents": "apart" if cell.documents else "across", **numbers}]


def launches_row(cell: Cell, measured: Measured) -> list[Row]:
    bare = next(
        (found for other, found in measured.items() if (other.part, other.trainer) == ("launches", "bare loop")), {}
    )
    own = measured[cell]["ms a step"]
    return [{**settings(cell), "ms a step": own, "ratio": own / bare["ms a step"] if bare else "unknown"}]


def snapshot_row(cell: Cell, measured: Measured) -> list[Row]:
    return [{**settings(cell), "precision": cell.precision, **measured[cell]}]


def kernels_row(cell: Cell, measured: Measured) -> list[Row]:
    found, total = measured[cell], sum(measured[cell].values())
    title = f"{TITLES['kernels']}; {str(cell).partition(', ')[2]}"
    ordered = sorted(found, key=lambda kind: -found[kind])
    return [
        {"part": title, "kernels": kind, "ms a step": found[kind], "share": found[kind] / total} for kind in ordered
    ]


ROWS: dict[str, Callable[[Cell, Measured], list[Row]]] = {
    "speed": speed_row,
    "launches": launches_row,
    "snapshot": snapshot_row,
    "kernels": kernels_row,
}


def goals(measured: Measured) -> list[Goal]:
    best: dict[str, float] = {}  # tokens/s of each trainer at its best setting, on the longer sequences
    utilisation: list[float] = []
    plain: dict[str, float] = {}  # eager, in bf16
    longest = max((cell.sequence for cell in measured if cell.part == "speed"), default=0)
    for cell, found in measured.items():
        if cell.part != "speed" or cell.sequence != longest or cell.documents:
            continue
        best[cell.trainer] = max(best.get(cell.trainer, 0.0), found["tokens/s"])
        if cell.trainer == "Echelon" and "MFU" in found:
            utilisation.append(found["MFU"])
        if (cell.precision, cell.compiled, cell.recompute) == ("bf16", "no", "no"):
            plain[cell.trainer] = found["ms a step"]
    reached: list[Goal] = []
    if "Echelon" in best and all(peer in best for peer in PEERS):
        ratio = best["Echelon"] / max(best[peer] for peer in PEERS)
        reached.append(at_least(f"tokens/s at sequence {longest}, times the faster peer at its best", 1.15, ratio))
    if utilisation:
        reached.append(at_least(f"MFU at sequence {longest}, at Echelon's best", 0.55, max(utilisation)))
    if {"Echelon", "bare loop"} <= plain.keys():
        reached.append(at_most("an eager step, times the bare loop", 1.02, plain["Echelon"] / plain["bare loop"]))
    return reached
