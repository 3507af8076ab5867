"""Samples that can't be read: left out of their micro-batch, written down, counted; too many of them end the run."""

import json
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.sampling.order import Ref
from trainer.errors import DataError
from trainer.files import Appended
from trainer.log import log

if TYPE_CHECKING:
    from trainer.trainer import Trainer


LEAST = 10  # samples of an epoch that may be bad, however small it is


class Bad(NamedTuple):
    """A sample that was left out, and why."""

    ref: Ref
    why: str
    shard: str | int  # its name; of a dataset, its number
    key: str | None  # where it can be read; of a dataset, the sample's number

    @property
    def line(self) -> dict[str, Any]:
        return {**self.ref._asdict(), "shard": self.shard, "key": self.key, "error": self.why}


class Quarantine:
    """quarantine.jsonl in the run's folder, written by rank 0: a line a sample, none lost or repeated by a resume."""

    def __init__(self, trainer: "Trainer") -> None:
        self.file = Appended(trainer.run_dir / "quarantine.jsonl")
        self.most = allowed(trainer.plan.data.max_bad, trainer.plan.epoch_samples or 0)
        self.epoch = self.count = 0  # the bad ones of this epoch
        self.saved = {"bytes": 0, "kept": ""}

    def begin(self) -> None:
        """Cuts off what was written after the checkpoint that the run goes on from. Rank 0."""
        self.file.go_on(self.saved)

    def take(self, trainer: "Trainer") -> None:
        """What this step's micro-batches have left out, on any rank. A collective.

        Raises:
            DataError: on all ranks, for more than may be bad.
        """
        step, epoch_samples = trainer.step, trainer.plan.epoch_samples
        own = [{"step": step, **bad.line} for bad in trainer.data.bad]
        found = [each for rank in trainer.ranks.gather(own) for each in rank]
        assert epoch_samples
        epoch = (trainer.samples - 1) // epoch_samples
        self.count = len(found) + (self.count if epoch == self.epoch else 0)
        self.epoch = epoch
        if trainer.rank == 0:
            self.file.write("".join(json.dumps(each) + "\n" for each in found).encode())
            for each in found:
                log.warning("step %d: left out: %s", step, each["error"])
        if self.count > self.most:
            raise DataError(
                f"data.max_bad: {self.count} samples of epoch {self.epoch} could not be read, and {self.most} may be; "
                f"the last: {found[-1]['error']}; all are in {self.file.path}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "count": self.count, "file": self.file.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.count, self.saved = state["epoch"], state["count"], state["file"]


def allowed(share: float, samples: int) -> int:
    """How many of the samples may be bad."""
    return int(max(LEAST, share * samples)) if share else 0


def stand_in(micros: Iterator[Any]) -> Generator[Any]:
    """Where all samples of a micro-batch are bad, so that none could be made, another one takes part, with weight 0.

    Raises:
        DataError: for so many at the beginning.
    """
    early, last = [], None
    for micro in micros:
        last = last if micro.batch is None else micro.batch
        early.append(micro)
        if last is not None:
            yield from (each._replace(batch=each.batch if each.batch is not None else last) for each in early)
            early.clear()
        elif len(early) == LEAST:
            raise DataError(micro.bad[0].why)
