"""One rank of bench_time_to_loss.py: comm_rank.py's server of turns, on real text. An order's row is `train METHOD`,
a whole training whose curve rank 0 writes beside the turn's folder, or `time METHOD`, a few steps."""

import io
import itertools
import json
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import comm_rank
import numpy as np
import torch
from comm_rank import BATCHES, RUNS, TIMEOUT_S, Clock, Over, settled
from comm_rows import CODEC_ROWS, INT8, ONE, ROWS, Row, meeting, onebit_adam, overlapped, summed
from torch.utils.data import Dataset, default_collate

from recipes.bert import Bert
from trainer.callback import Callback, Role
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.data.sampling.order import walk
from trainer.data.source import open_source
from trainer.optim.factories import adamw
from trainer.optim.schedule import Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

VALIDATED = 512  # sequences, the same ones with the same masks each time
VALIDATIONS = 15  # in a training
CURVE = "curve.json"  # a list of (step, validation loss, seconds of training until then)


@dataclass(frozen=True)
class Size:
    vocab: int
    hidden: int
    layers: int
    heads: int
    batch: int  # of a rank
    lr: float  # one that plain training does well with
    compute_s: float  # of a step on one core, about: how many steps a turn has follows from it
    sequence: int = 64


SIZES = {
    "tiny": Size(2048, 128, 2, 2, 4, 2e-3, 0.02),
    "10M": Size(8192, 320, 6, 5, 4, 3e-4, 0.25),
    "30M": Size(8192, 512, 8, 8, 4, 2e-4, 0.8),
}


@dataclass(frozen=True)
class Method:
    """`timed` is what its steps are timed with, where that is not `row`; `plain` of them are as long as bare DDP's.
    It trains for `longer` times DDP's steps, with a learning rate that falls over all of them."""

    row: Row
    timed: Row | None = None
    plain: int = 0
    longer: float = 1.0


METHODS = {
    "ddp": Method(Row("echelon", summed(4)), Row("ddp", summed(4))),
    **{name: Method(CODEC_ROWS[name]) for name in ("bf16", "int8", "topk", "dgc", "sign")},
    "powersgd": Method(CODEC_ROWS["powersgd-4"]),
    "onebit_adam": Method(onebit_adam(), onebit_adam(warmup_steps=2), OneBitAdam().warmup_steps),
    "local_sgd": Method(meeting(8)),
    "diloco": Method(meeting(8, outer="nesterov")),
    "local_sgd+int8": Method(meeting(8, INT8)),
    "local_sgd-32-delay-16+int8": Method(ROWS["local_sgd-32-delay-16+int8"]),
    "overlap+powersgd": Method(overlapped(CODEC_ROWS["powersgd-4"], ONE)),
    "overlap+powersgd-longer": Method(overlapped(CODEC_ROWS["powersgd-4"], ONE), longer=1.1),
}
FREE = Row("alone")  # steps without communication


class Sequences(Dataset):
    def __init__(self, shard: Path, count: int) -> None:
        """`count` of them, evenly over the shard."""
        with tarfile.open(shard) as tar:
            files = [tar.extractfile(member) for member in tar if member.name.endswith(".npy")]
            rows = [np.load(io.BytesIO(file.read())) for file in files if file]
        self.rows = rows[:: max(1, len(rows) // count)][:count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"npy": self.rows[i]}


class Text(Bert):
    """The recipe, on its default text. Validation is on a sample."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            vocab=size.vocab, sequence=size.sequence, dropout=0.0,
            hidden=size.hidden, layers=size.layers, heads=size.heads,
        )  # fmt: skip
        self.batch = size.batch

    def data(self, split: str) -> Any:
        return super().data(split) if split == "train" else Sequences(super().data(split)[0], VALIDATED)


class Held:
    """The first batches of the text, in memory: for the time of a step that waits for no data."""

    def __init__(self, text: Text, place: Place) -> None:
        self.model, self.loss, self.weight, self.batch = text.model, text.loss, text.weight, text.batch
        source: Any = open_source(text, "train", seed=0)
        refs = walk(source.counts, place.rank, place.world)
        parts = [list(itertools.islice(refs, text.batch)) for _ in range(BATCHES)]
        self.batches = [default_collate(source.batch(part)[0]) for part in parts]

    def data(self, split: str) -> list[Any] | None:
        return self.batches if split == "train" else None


class Learns(Callback):
    """Keeps the curve. Its seconds leave validations out, but for what had to be flushed before."""

    role = Role.MEASURE

    def __init__(self, ask: Callable[[dict[str, Any]], None]) -> None:
        self.ask = ask
        self.curve: list[tuple[int, float, float]] = []
        self.seconds = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        self.ask({"set up": True})
        self.sent = settled()
        self.ask({"settled": True})
        self.since = time.perf_counter()

    def on_flush(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        self.seconds, self.since = self.seconds + now - self.since, now

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.curve.append((trainer.step, metrics["val/loss"], self.seconds))
        if trainer.step == trainer.plan.max_steps:
            raise Over  # nothing is to be saved
        self.since = time.perf_counter()


def train(row: Row, size: Size, text: Text, place: Place, steps: int, ask: Callable[[dict[str, Any]], None]) -> None:
    folder = Path(place.store).parent
    options = Options(
        accelerator="cpu",
        run_dir=str(folder / "run"),
        timeout_s=TIMEOUT_S,
        max_steps=steps,
        validate_every=max(1, steps // VALIDATIONS),
        checkpoint=CheckpointOptions(str(folder / "ckpt"), every_steps=None, every_minutes=None),
        ddp=DDPOptions(row.bucket_mib),
    )
    learns = Learns(ask)
    trainer = Trainer(
        text, {**row.build(), "learns": learns}, partial(adamw, lr=size.lr), Linear(warmup=steps // 10),
        batch=text.batch * place.world, options=options, data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    try:
        trainer.fit()
    except Over:
        trainer.close()
    if place.rank == 0:
        (folder.parent / CURVE).write_text(json.dumps(learns.curve))
    ask({"seconds": learns.seconds / steps})
    ask({"sent": (settled() - learns.sent) / steps})


def turn(order: dict[str, Any], ask: Callable[[dict[str, Any]], None]) -> None:
    torch.set_num_threads(1)
    what, _, name = order["row"].partition(" ")
    place = Place(order["rank"], order["world"], 0, 1, order["store"], "benchmark")
    size = SIZES[order["model"]]
    text, method = Text(size), METHODS.get(name)
    if what == "train":
        assert method is not None
        train(method.row, size, text, place, order["steps"], ask)
    else:
        row = timed(name)
        RUNS[row.run](row, Held(text, place), place, Clock(ask, row, order["steps"]))


def timed(name: str) -> Row:
    """What is run to time this method's steps; of no method, steps without communication."""
    method = METHODS.get(name)
    return FREE if method is None else method.timed or method.row


if __name__ == "__main__":
    comm_rank.turn = turn
    comm_rank.main()
