"""The cells of the bench: what each trains, in the order in which they are measured."""

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


@dataclass(frozen=True)
class Cell:
    """A trainer with its settings.

    Attributes:
        part: The table: speed, launches, snapshot or kernels.
        trainer: Echelon, or one of `measure.LOOPS`.
        sequence: Tokens of a sample.
        micro: Samples of a step.
        compiled: no, blocks or whole.
        recompute: no, a policy of activation_checkpoint, or a budget.
        documents: Tokens attend within their document, by FlexAttention on a GPU.
        warm: Steps before the timed ones.
    """

    part: str
    trainer: str
    sequence: int = 512
    micro: int = 64
    precision: str = "bf16"
    compiled: str = "no"
    recompute: str = "no"
    documents: bool = False
    size: Size = LARGE
    backend: str = "inductor"
    warm: int = 6
    timed: int = 24

    def __str__(self) -> str:
        words = [self.part, self.trainer, f"sequence {self.sequence}", f"micro_batch {self.micro}", self.precision]
        words += [f"compiled {self.compiled}"] if self.compiled != "no" else []
        words += [f"recompute {self.recompute}"] if self.recompute != "no" else []
        return ", ".join([*words, "documents"] if self.documents else words)


PEERS = ("Hugging Face Trainer", "Lightning")


def matrix(memory_gib: float) -> list[Cell]:
    """List the cells, the most important first.

    Args:
        memory_gib: The GPU's memory. From 70 GiB on a step has 64 samples of 512 tokens, below that 16.
    """
    micro = 64 if memory_gib >= 70 else 16

    def speed(trainer: str, compiled: str = "no", precision: str = "bf16", **more: Any) -> Cell:
        return replace(Cell("speed", trainer, 512, micro, precision, compiled), **more)

    short: dict[str, Any] = {"sequence": 128, "micro": 4 * micro}
    return [
        speed("Echelon", "blocks", "bf16_params"),
        *(speed(peer, "whole") for peer in PEERS),
        speed("Echelon", "blocks"),
        speed("bare loop"),
        speed("Echelon"),
        *(speed(peer) for peer in PEERS),
        *(Cell("launches", name, 128, 1, size=NARROW) for name in ("bare loop", "Echelon", *PEERS)),
        Cell("snapshot", "Echelon", 512, micro),
        speed("Echelon", "blocks", "fp8"),
        Cell("kernels", "Echelon", 512, micro, "bf16_params", "blocks"),
        speed("Echelon", "blocks", "bf16_params", **short),
        *(speed(peer, "whole", **short) for peer in PEERS),
        speed("Echelon", "whole", "bf16_params"),
        speed("Echelon", "blocks", "bf16_params", recompute="selective"),
        speed("Echelon", "blocks", "bf16_params", recompute="full"),
        speed("Echelon", precision="bf16_params"),
        speed("Echelon", recompute="full"),
        speed("Echelon", recompute="budget=0.5"),
        speed("Echelon", "blocks", "bf16_params", documents=True),
        speed("Echelon", recompute="offload"),
        speed("Echelon", "blocks", "fp8", **short),
        speed("Echelon", **short),
    ]


def miniature(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells in a size for a CPU, and compiled by a backend that generates no code."""
    small: dict[str, Any] = {"size": TINY, "backend": "aot_eager", "warm": 1, "timed": 2}
    return [replace(cell, sequence=cell.sequence // 8, micro=min(cell.micro, 2), **small) for cell in cells]
