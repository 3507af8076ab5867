"""Samples that can't be read: left out of their micro-batch, written down, counted; too many of them end the run."""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.sampling.order import Ref
from trainer.errors import DataError
from trainer.files import Appended
from trainer.log import log

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


class BadSamples:
    """The list of an epoch's bad samples: a line for each in a file, which rank 0 writes. A resume loses and repeats
    none.

    Args:
        path: Of the file.
        limit: Bad samples that an epoch may have.
        gather: Returns on every rank what each of them passes. A collective.
    """

    def __init__(self, path: Path, limit: int, gather: Callable[[Any], list[Any]], rank: int) -> None:
        self.file, self.limit, self.gather, self.rank = Appended(path), limit, gather, rank
        self.epoch = self.count = 0  # bad samples of this epoch
        self.saved = {"bytes": 0, "kept": ""}

    def begin(self) -> None:
        """Cut off the lines that were written after the checkpoint of the resume. Rank 0 calls it."""
        self.file.go_on(self.saved)

    def take(self, step: int, epoch: int, bad: Sequence[Bad]) -> None:
        """Count and list the bad samples of a step, of all ranks. A collective.

        Raises:
            DataError: on all ranks, for more than the limit.
        """
        found = [each for rank in self.gather([{"step": step, **one.line} for one in bad]) for each in rank]
        self.count = len(found) + (self.count if epoch == self.epoch else 0)
        self.epoch = epoch
        if self.rank == 0:
            self.file.write("".join(json.dumps(each) + "\n" for each in found).encode())
            for each in found:
                log.warning("step %d: left out: %s", step, each["error"])
        if self.count > self.limit:
            raise DataError(
                f"data.max_bad: {self.count} samples of epoch {self.epoch} could not be read, and {self.limit} may be; "
                f"the last: {found[-1]['error']}; all are in {self.file.path}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "count": self.count, "file": self.file.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.count, self.saved = state["epoch"], state["count"], state["file"]


def allowed(share: float, samples: int) -> int:
    """Return how many of the samples may be bad."""
    return int(max(LEAST, share * samples)) if share else 0


def stand_in(micros: Iterator[Any]) -> Generator[Any]:
    """Yield micro-batches; in place of one whose samples are all bad, another one with weight 0.

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
