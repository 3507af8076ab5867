"""Samples that can't be read: left out of their micro-batch, written down, counted; too many of them end the run."""

import json
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.order import Ref
from trainer.errors import DataError
from trainer.run import log

if TYPE_CHECKING:
    from trainer.trainer import Trainer

LEAST = 10  # samples of an epoch that may be bad, however small it is


class Bad(NamedTuple):
    """A sample that was left out, and why."""

    ref: Ref
    why: str


class Quarantine:
    """quarantine.jsonl in the run's folder, written by rank 0: a line a sample, none lost or repeated by a resume."""

    def __init__(self, trainer: "Trainer") -> None:
        self.path, share = trainer.run_dir / "quarantine.jsonl", trainer.plan.data.max_bad
        self.most = int(max(LEAST, share * (trainer.plan.epoch_samples or 0))) if share else 0
        self.epoch = self.count = self.bytes = 0  # the bad ones of this epoch; of the file

    def begin(self) -> None:
        """Cuts off what was written after the checkpoint that the run goes on from. Rank 0."""
        if self.path.exists():
            os.truncate(self.path, min(self.bytes, self.path.stat().st_size))

    def take(self, trainer: "Trainer") -> None:
        """What this step's micro-batches have left out, on any rank. A collective.

        Raises:
            DataError: on all ranks, for more than may be bad.
        """
        step, epoch_samples = trainer.step, trainer.plan.epoch_samples
        own = [{"step": step, **bad.ref._asdict(), "error": bad.why} for bad in trainer.data.bad]
        found = [each for rank in trainer.ranks.gather(own) for each in rank]
        assert epoch_samples
        epoch = (trainer.samples - 1) // epoch_samples
        self.count = len(found) + (self.count if epoch == self.epoch else 0)
        self.epoch = epoch
        if trainer.rank == 0:
            with self.path.open("a") as file:
                file.writelines(json.dumps(each) + "\n" for each in found)
                file.flush()
                os.fsync(file.fileno())
            self.bytes = self.path.stat().st_size
            for each in found:
                log.warning("step %d: left out: %s", step, each["error"])
        if self.count > self.most:
            raise DataError(
                f"data.max_bad: {self.count} samples of epoch {self.epoch} could not be read, and {self.most} may be; "
                f"the last: {found[-1]['error']}; all are in {self.path}"
            )

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "count": self.count, "bytes": self.bytes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.count, self.bytes = state["epoch"], state["count"], state["bytes"]


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
