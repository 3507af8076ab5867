"""The methods that are compared, and the sizes of the model."""

from dataclasses import dataclass

from scripts.bench.comm.rows import CODEC_ROWS, INT8, ONE, ROWS, Row, meeting, onebit_adam, overlapped, sends
from trainer.callbacks.onebit_adam.callback import OneBitAdam


@dataclass(frozen=True)
class Size:
    vocab: int
    hidden: int
    layers: int
    heads: int
    batch: int  # of a rank
    lr: float  # good for plain training
    compute_s: float  # of a step on one core, about: decides the number of steps of a turn
    sequence: int = 64


SIZES = {
    "tiny": Size(2048, 128, 2, 2, 4, 2e-3, 0.02),
    "10M": Size(8192, 320, 6, 5, 4, 3e-4, 0.25),
    "30M": Size(8192, 512, 8, 8, 4, 2e-4, 0.8),
}


@dataclass(frozen=True)
class Method:
    """A way to train, `row`.

    Its steps are timed with `timed` if that is given; `plain` of them take as long as bare DDP's. It trains for
    `longer` times DDP's steps, and its learning rate falls over all of them.
    """

    row: Row
    timed: Row | None = None
    plain: int = 0
    longer: float = 1.0


METHODS = {
    "ddp": Method(Row("echelon", sends()), Row("ddp", sends())),
    **{name: Method(CODEC_ROWS[name]) for name in ("bf16", "int8", "topk", "dgc", "sign")},
    "powersgd": Method(CODEC_ROWS["powersgd-4"]),
    "powersgd-bf16": Method(CODEC_ROWS["powersgd-4-bf16"]),
    "onebit_adam": Method(onebit_adam(), onebit_adam(warmup_steps=2), OneBitAdam().warmup_steps),
    "local_sgd": Method(meeting(8)),
    "diloco": Method(meeting(8, outer="nesterov")),
    "local_sgd+int8": Method(meeting(8, INT8)),
    "local_sgd-32-delay-16+int8": Method(ROWS["local_sgd-32-delay-16+int8"]),
    "overlap+powersgd": Method(overlapped(CODEC_ROWS["powersgd-4"], ONE)),
    "overlap+powersgd-longer": Method(overlapped(CODEC_ROWS["powersgd-4"], ONE), longer=1.1),
}
FREE = Row("alone")  # steps without communication


def timed(name: str) -> Row:
    """Return the row that is run to time a method's steps; the row without communication if `name` is no method."""
    method = METHODS.get(name)
    return FREE if method is None else method.timed or method.row
