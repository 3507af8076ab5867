"""Serves turns on one rank, on real text.

The row of an order is `train METHOD` or `time METHOD`. The first is a whole training, whose curve rank 0 writes next to
the turn's folder. The second is a few steps.
"""

import io
import itertools
import json
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, default_collate

from recipes.bert import Bert
from scripts.bench.comm.rank import BATCHES, RUNS, options_in
from scripts.bench.comm.rows import Row
from scripts.bench.hosts import Ask, Clock, Order, Over, fit, place_of, serve, settled
from scripts.bench.loss.methods import METHODS, SIZES, Size, timed
from trainer.callback import Callback, Role
from trainer.config.options import DataOptions
from trainer.context import Context
from trainer.data.opening import open_source
from trainer.data.sampling.order import walk
from trainer.optim.factories import adamw
from trainer.optim.schedule import Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

VALIDATED = 512  # sequences, the same ones with the same masks each time
VALIDATIONS = 15  # in a training
CURVE = "curve.json"  # a list of (step, validation loss, seconds of training until then)


class Sequences(Dataset):
    """`count` sequences, evenly over the shard."""

    def __init__(self, shard: Path, count: int) -> None:
        with tarfile.open(shard) as tar:
            files = [tar.extractfile(member) for member in tar if member.name.endswith(".npy")]
            rows = [np.load(io.BytesIO(file.read())) for file in files if file]
        self.rows = rows[:: max(1, len(rows) // count)][:count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"npy": self.rows[i]}


class Text(Bert):
    """The recipe, on its default text. Validation reads a sample of the split."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            vocab=size.vocab, sequence=size.sequence, dropout=0.0,
            hidden=size.hidden, layers=size.layers, heads=size.heads,
        )  # fmt: skip
        self.batch = size.batch

    def data(self, split: str) -> Any:
        return super().data(split) if split == "train" else Sequences(super().data(split)[0], VALIDATED)


class Held:
    """The first batches of the text, in memory, so that a timed step waits for no data."""

    def __init__(self, text: Text, place: Place) -> None:
        self.model, self.loss, self.weight, self.batch = text.model, text.loss, text.weight, text.batch
        source: Any = open_source(text, "train", seed=0)
        parts = itertools.islice(walk(source.counts, place.rank, place.world, text.batch), BATCHES)
        self.batches = [default_collate(source.batch(part)[0]) for part in parts]

    def data(self, split: str) -> list[Any] | None:
        return self.batches if split == "train" else None


class Learns(Callback):
    """Keeps the curve. Its seconds include the flush before a validation, but not the validation."""

    role = Role.MEASURE

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.curve: list[tuple[int, float, float]] = []
        self.seconds = 0.0

    def on_fit_start(self, trainer: Context) -> None:
        self.ask({"set up": True})
        self.sent = settled()
        self.ask({"settled": True})
        self.since = time.perf_counter()

    def on_flush(self, trainer: Context) -> None:
        now = time.perf_counter()
        self.seconds, self.since = self.seconds + now - self.since, now

    def on_validation_end(self, trainer: Context, metrics: dict[str, float]) -> None:
        self.curve.append((trainer.step, metrics["val/loss"], self.seconds))
        if trainer.step == trainer.plan.max_steps:
            raise Over
        self.since = time.perf_counter()


def train(row: Row, size: Size, text: Text, place: Place, steps: int, ask: Ask) -> None:
    folder = Path(place.store).parent
    options = options_in(folder, row, max_steps=steps, validate_every=max(1, steps // VALIDATIONS))
    learns = Learns(ask)
    fit(Trainer(
        text, {**row.build(), "learns": learns}, partial(adamw, lr=size.lr), Linear(warmup=steps // 10),
        batch=text.batch * place.world, options=options, data=DataOptions(workers=0), place=place,
    ))  # fmt: skip
    if place.rank == 0:
        (folder.parent / CURVE).write_text(json.dumps(learns.curve))
    ask({"seconds": learns.seconds / steps})
    ask({"sent": (settled() - learns.sent) / steps})


def turn(order: Order, ask: Ask) -> None:
    what, _, name = order["row"].partition(" ")
    place, size = place_of(order), SIZES[order["model"]]
    text = Text(size)
    if what == "train":
        train(METHODS[name].row, size, text, place, order["steps"], ask)
    else:
        row = timed(name)
        RUNS[row.run](row, Held(text, place), place, Clock(ask, order["steps"], row.warm, row.every))


if __name__ == "__main__":
    serve(turn)
