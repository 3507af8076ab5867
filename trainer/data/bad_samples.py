"""Counts and lists unreadable samples, which micro-batches leave out; too many of them end the run."""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.sampling.order import Ref
from trainer.errors import DataError
from trainer.files import Appended
from trainer.log import log

LEAST = 10  # bad samples that any epoch may have, however small it is


class Bad(NamedTuple):
    """A sample that was left out, and the reason."""

    ref: Ref
    why: str
    shard: str | int  # the shard's name; for a dataset, its number
    key: str | None  # the sample's key, if it can be read; for a dataset, the sample's number

    @property
    def line(self) -> dict[str, Any]:
        return {**self.ref._asdict(), "shard": self.shard, "key": self.key, "error": self.why}


class BadSamples:
    """Lists an epoch's bad samples, one line each, in a file on rank 0. A resume neither loses nor repeats any.

    Args:
        path: Path of the file.
        limit: The number of bad samples that an epoch may have.
        gather: Returns the values of all ranks on every rank. A collective.
    """

    def __init__(self, path: Path, limit: int, gather: Callable[[Any], list[Any]], rank: int) -> None:
        self.file, self.limit, self.gather, self.rank = Appended(path), limit, gather, rank
        self.epoch = self.count = 0  # bad samples of this epoch
        self.saved = {"bytes": 0, "kept": ""}

    def begin(self) -> None:
        """Truncate the lines that were written after the resumed checkpoint. Called on rank 0."""
        self.file.go_on(self.saved)

    def take(self, step: int, epoch: int, bad: Sequence[Bad], data_rank: int) -> None:
        """Count and list the bad samples of all ranks in a step. A collective.

        Args:
            data_rank: This rank's index among those that read different samples. Samples that several ranks read count
                once.

        Raises:
            DataError: The epoch has more than the limit. Raised on all ranks.
        """
        parts = dict(self.gather([data_rank, [{"step": step, **one.line} for one in bad]]))
        found = [each for part in parts.values() for each in part]
        self.count = len(found) + (self.count if epoch == self.epoch else 0)
        self.epoch = epoch
        if self.rank == 0:
            self.file.write("".join(json.dumps(each) + "\n" for each in found).encode())
            for each in found:
                log.warning("step %d: a sample is left out: %s", step, each["error"])
        if self.count > self.limit:
            raise DataError(
                f"data.max_bad: {self.count} samples of epoch {self.epoch} could not be read, and the limit is "
                f"{self.limit}; the last: {found[-1]['error']}; {self.file.path} lists all"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "count": self.count, "file": self.file.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.count, self.saved = state["epoch"], state["count"], state["file"]


def allowed(share: float, samples: int) -> int:
    """Return the number of samples that may be bad."""
    return int(max(LEAST, share * samples)) if share else 0


def replace_bad(micros: Iterator[Any]) -> Generator[Any]:
    """Yield micro-batches, replacing one whose samples are all bad by another one's batch with weight 0.

    Raises:
        DataError: The first `LEAST` micro-batches have no good sample.
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
