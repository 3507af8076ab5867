"""The rows of the tables: how each row trains, and how many bytes a rank should send for it in a step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.harness import Row as Cells
from trainer.callback import Callback
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.overlap.callback import Overlap
from trainer.comm.codecs.powersgd import factors
from trainer.comm.codecs.registry import make
from trainer.comm.codecs.sign import sign_bytes
from trainer.composition import arrange
from trainer.cost.messages import Message, Shapes, plain, sent

Formula = Callable[[Shapes, int], float]  # shapes, number of ranks -> bytes that a rank sends in a step
CLASSES: dict[str, type[Callback]] = {
    "grad_compress": GradCompress, "overlap": Overlap, "local_sgd": LocalSGD, "onebit_adam": OneBitAdam
}  # fmt: skip
ONE = 1e4  # MiB: one bucket for all
SLICE = 1.0  # MiB: overlap is fastest with small slices, since only one is sent at a time
BUCKET = 5.0  # MiB: a bucket is encoded while the one before it is sent


@dataclass(frozen=True)
class Row:
    """A way to train.

    `run` is the name of a function in `rank.py`. `callbacks` maps names to arguments. Weights are averaged every
    `every` steps.
    """

    run: str
    sends: Formula | None = None
    bucket_mib: float | None = None  # None: torch's 25, after a first one of 1
    hook: str = ""  # torch's
    callbacks: dict[str, Cells] = field(default_factory=dict)
    every: int = 1

    @property
    def learns(self) -> bool:
        """Whether the set-up measures the link, which therefore has to be slow before it."""
        return "overlap" in self.callbacks

    @property
    def warm(self) -> int:
        """The number of steps before those that are timed: they allocate buffers and moments."""
        return self.every * math.ceil(5 / self.every)

    def build(self) -> dict[str, Callback]:
        built = {name: CLASSES[name](**arguments) for name, arguments in self.callbacks.items()}
        arrange(built, set())
        return built


def sends(codec: str = "none", **knobs: Any) -> Formula:
    """Make the formula of a codec, which the cost model has."""
    if codec == "none":
        return lambda shapes, ranks: sent(plain(shapes), ranks)
    made = make(codec, knobs)
    return lambda shapes, ranks: sent(made.messages(shapes, ranks), ranks)


def torch_powersgd(shapes: Shapes, ranks: int) -> float:
    return sent(factors(shapes, 1, least=2.0), ranks)


def seldom(sends: Formula, every: int) -> Formula:
    return lambda shapes, ranks: sends(shapes, ranks) / every


def compressed(codec: str, bucket_mib: float | None = ONE, **knobs: Any) -> Row:
    return Row("echelon", sends(codec, **knobs), bucket_mib, callbacks={"grad_compress": {"codec": codec, **knobs}})


def overlapped(row: Row, bucket_mib: float = SLICE) -> Row:
    return Row("echelon", row.sends, bucket_mib, callbacks={"overlap": {}, **row.callbacks})


def signs(shapes: Shapes, ranks: int) -> float:
    size = sign_bytes(shapes)
    return sent([Message("all_to_all", size), Message("all_gather", size)], ranks)


def onebit_adam(**arguments: Any) -> Row:
    return Row("echelon", signs, callbacks={"onebit_adam": arguments})


def meeting(every: int, row: Row | None = None, **arguments: Any) -> Row:
    formula, codec = (row.sends, row.callbacks) if row else (sends(), {})
    assert formula is not None
    return Row(
        "echelon", seldom(formula, every), callbacks={"local_sgd": {"every": every, **arguments}, **codec}, every=every
    )


CODEC_ROWS = {
    "bf16": compressed("bf16", None),
    "fp16": compressed("fp16", None),
    "int8": compressed("int8", BUCKET),
    "topk": compressed("topk", None, density=0.01),
    "dgc": compressed("dgc", density=0.001),
    "sign": compressed("sign", BUCKET),
    "powersgd-1": compressed("powersgd", rank=1),
    "powersgd-4": compressed("powersgd", rank=4),
    "powersgd-4-bf16": compressed("powersgd", rank=4, factors="bf16"),
    "blocksparse": compressed("blocksparse"),
}
INT8 = CODEC_ROWS["int8"]
PLAIN = Row("echelon", sends())
ROWS: dict[str, Row] = {
    "no-communication": Row("alone"),
    "all-reduce-alone": Row("wire", sends()),
    "ddp-25": Row("ddp", sends()),
    "ddp-5": Row("ddp", sends(), 5.0),
    "ddp-one": Row("ddp", sends(), ONE),
    "torch-fp16": Row("ddp", sends("bf16"), hook="fp16"),
    "torch-bf16": Row("ddp", sends("bf16"), hook="bf16"),
    "torch-powersgd-1": Row("ddp", torch_powersgd, ONE, "powersgd"),  # with several buckets it crashes on gloo
    "torch-local_sgd-16": Row("averaged", seldom(sends(), 16), every=16),
    "plain": PLAIN,
    "nothing-reduced": Row(
        "echelon", callbacks={"local_sgd": {"every": 1_000_000}}
    ),  # the messages of the trainer itself
    **CODEC_ROWS,
    "onebit_adam": onebit_adam(warmup_steps=2),
    "overlap": overlapped(PLAIN),
    "overlap+bf16": overlapped(CODEC_ROWS["bf16"]),
    "overlap+int8": overlapped(INT8),
    "overlap+topk": overlapped(CODEC_ROWS["topk"], 25.0),
    "overlap+dgc": overlapped(CODEC_ROWS["dgc"], ONE),
    "overlap+powersgd-1": overlapped(CODEC_ROWS["powersgd-1"], ONE),
    "local_sgd-4": meeting(4),
    "local_sgd-16": meeting(16),
    "local_sgd-16+int8": meeting(16, INT8),
    "local_sgd-16-delay-8": meeting(16, delay=8),
    "local_sgd-16-delay-8+int8": meeting(16, INT8, delay=8),
    "local_sgd-32-delay-16+int8": meeting(32, INT8, delay=16),
    "diloco-16": meeting(16, outer="nesterov"),
    "diloco-32-delay-16+int8": meeting(32, INT8, outer="nesterov", delay=16),
}
BASES = ("no-communication", "all-reduce-alone", "ddp-25")  # every ratio is to one of these or to a faster bare DDP
DDP = ("ddp-25", "ddp-5", "ddp-one")
QUICK = (
    "torch-bf16", "bf16", "torch-powersgd-1", "powersgd-1", "topk", "overlap", "overlap+powersgd-1", "local_sgd-16+int8"
)  # fmt: skip
TORCHS = {name: f"torch-{name}" for name in ("fp16", "bf16", "powersgd-1", "local_sgd-16")}
