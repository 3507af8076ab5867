"""The parts of the run on one GPU and their cells: what each measures, in order of worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Size(NamedTuple):
    vocab: int
    hidden: int
    layers: int
    heads: int


LARGE = Size(30528, 1024, 24, 16)
NARROW = Size(2048, 128, 24, 2)  # as many kernels as LARGE, and next to no work in them
TINY = Size(512, 32, 2, 2)
TESTS, IMAGES = "tests", "images"


@dataclass(frozen=True)
class Cell:
    """What one process measures: a trainer with its settings, or a list of tests.

    Attributes:
        kind: How it is measured, a key of `measure.KINDS`.
        trainer: Echelon, or one of `measure.LOOPS`.
        sequence: Tokens of a sample.
        micro: Samples of a step.
        compiled: no, blocks, whole, or blocks with a mode of Inductor: graphs or autotuned.
        recompute: no, a policy of activation_checkpoint, or a budget.
        documents: Tokens attend within their document, by FlexAttention on a GPU.
        chunks: Parts in which the head and the loss are computed.
        warm: Steps before the timed ones.
    """

    kind: str
    trainer: str = "Echelon"
    sequence: int = 512
    micro: int = 64
    precision: str = "bf16"
    compiled: str = "no"
    recompute: str = "no"
    documents: bool = False
    chunks: int = 1
    size: Size = LARGE
    backend: str = "inductor"
    warm: int = 5
    timed: int = 15

    def __str__(self) -> str:
        if self.kind in (TESTS, IMAGES):
            return f"{self.kind}, {self.trainer}"
        words = [self.kind, self.trainer, f"sequence {self.sequence}", f"micro_batch {self.micro}", self.precision]
        words += [f"compiled {self.compiled}"] if self.compiled != "no" else []
        words += [f"recompute {self.recompute}"] if self.recompute != "no" else []
        words += [f"chunks {self.chunks}"] if self.chunks > 1 else []
        return ", ".join([*words, "documents"] if self.documents else words)


class Part(NamedTuple):
    """Cells of one question. A part may also use the seconds that the parts before it have left."""

    name: str
    limit_s: float
    cells: list[Cell]


class Rung(NamedTuple):
    """A cell of MFU's ladder, and the cell to which it adds one setting."""

    name: str
    cell: Cell
    on: Cell | None


PEERS = ("Hugging Face Trainer", "Lightning")


def speed(micro: int, trainer: str, compiled: str = "no", precision: str = "bf16", **more: Any) -> Cell:
    return replace(Cell("speed", trainer, 512, micro, precision, compiled), **more)


def ladder(micro: int) -> list[Rung]:
    """List the rungs. CUDA graphs are measured in a bare loop, because `compile` refuses them."""
    eager, blocks = speed(micro, "Echelon"), speed(micro, "Echelon", "blocks")
    best, bare = replace(blocks, precision="bf16_params"), replace(blocks, trainer="bare loop")
    return [
        Rung("eager, bf16 by autocast", eager, None),
        Rung("compiled blocks", blocks, eager),
        Rung("bf16_params", best, blocks),
        Rung("head and loss in 4 chunks", replace(best, chunks=4), best),
        Rung("packed documents, attention within each", replace(best, documents=True), best),
        Rung("fp8 instead of bf16 by autocast", replace(blocks, precision="fp8"), blocks),
        Rung("CUDA graphs per block, in a bare loop", replace(bare, compiled="blocks, graphs"), bare),
        Rung("twice the samples, head and loss in 4 chunks", replace(best, micro=2 * micro, chunks=4), best),
    ]


def parts(memory_gib: float) -> list[Part]:
    """List the parts, the most important first. Their limits add up to eight minutes.

    The limits are estimates for an H200, where an eager step of 64 samples took 0.19 s. A process is assumed to need
    15 s until its first step, and 15 s more if it compiles blocks. Whole models come last: on the H200, Lightning's had
    not compiled after 81 s.

    Args:
        memory_gib: The GPU's memory. From 70 GiB on a step has 64 samples of 512 tokens, below that 16.
    """
    micro = micro_batch(memory_gib)
    rungs = [rung.cell for rung in ladder(micro)]
    best = rungs[2]
    turns = Cell("turns", micro=16)
    bert = [best, *(speed(micro, peer, "blocks") for peer in PEERS), speed(micro, "bare loop")]
    bert += [speed(micro, "bare loop", "blocks"), *(speed(micro, peer) for peer in PEERS)]
    return [
        Part("tests", 25, [Cell(TESTS, "the three tests that failed on 2026-11-26")]),
        Part("overhead", 65, [turns, replace(turns, sequence=128, micro=1, size=NARROW)]),
        Part("bert", 150, bert),
        Part("kernels", 30, [replace(best, kind="kernels")]),
        Part("ladder", 135, rungs),
        Part("checkpoint", 25, [Cell("snapshot", micro=micro)]),
        Part("images", 20, [Cell(IMAGES, trainer, micro=256, timed=50) for trainer in ("Echelon", "bare loop")]),
        Part("others", 30, others(micro, best)),
    ]


def micro_batch(memory_gib: float) -> int:
    return 64 if memory_gib >= 70 else 16


def others(micro: int, best: Cell) -> list[Cell]:
    short: dict[str, Any] = {"sequence": 128, "micro": 4 * micro}
    return [
        *(speed(micro, peer, "whole") for peer in PEERS),
        replace(best, compiled="whole"),
        replace(best, compiled="blocks, autotuned"),
        replace(best, **short),
        *(replace(speed(micro, peer, "blocks"), **short) for peer in PEERS),
        replace(best, recompute="selective"),
        replace(best, recompute="full"),
        *(speed(micro, "Echelon", recompute=recompute) for recompute in ("full", "budget=0.5", "offload")),
    ]


def miniature(cell: Cell) -> Cell:
    """Return the cell in a size for a CPU, and compiled by a backend that generates no code."""
    small = replace(cell, size=TINY, backend="aot_eager", warm=1, timed=2)
    return replace(small, sequence=cell.sequence // 8, micro=cell.micro // 8 or 1)


def miniatures(whole: Sequence[Part]) -> list[Part]:
    return [part._replace(cells=[miniature(cell) for cell in part.cells]) for part in whole]
