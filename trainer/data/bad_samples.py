"""Counts and lists unreadable samples, which are dropped from micro-batches; too many of them end the run."""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.sampling.order import Ref
from trainer.errors import DataError
from trainer.files import Appended
from trainer.log import log

ALWAYS_ALLOWED = 10  # bad samples that any epoch may have, however small it is


class Bad(NamedTuple):
    ref: Ref
    why: str
    shard: str | int  # the name of a tar shard, the number of a dataset's virtual shard
    key: str | None  # the sample's key, None if it can't be read; for a dataset, the sample's number

    @property
    def line(self) -> dict[str, Any]:
        return {**self.ref._asdict(), "shard": self.shard, "key": self.key, "error": self.why}


class BadSamples:
    """Writes bad samples to the file `path` on rank 0, one line each. A resume neither loses nor repeats any.

    Args:
        limit: The number of bad samples that an epoch may have.
        gather: Returns the values of all ranks on every rank. A collective.
    """

    def __init__(self, path: Path, limit: int, gather: Callable[[Any], list[Any]], rank: int) -> None:
        self.file, self.limit, self.gather, self.rank = Appended(path), limit, gather, rank
        self.epoch = self.count = 0  # `count`: bad samples of this epoch
        self.saved = {"bytes": 0, "kept": ""}

    def begin(self) -> None:
        """Remove the lines that were written after the resumed checkpoint. Called on rank 0."""
        self.file.go_on(self.saved)

    def take(self, step: int, epoch: int, bad: Sequence[Bad], data_rank: int) -> None:
        """Count and list the bad samples of all ranks in a step. A collective.

        Args:
            data_rank: Equal on ranks that read the same samples, which count once.

        Raises:
            DataError: The epoch has more than the limit. Raised on all ranks.
        """
        by_rank = dict(self.gather([data_rank, [{"step": step, **sample.line} for sample in bad]]))
        lines = [line for part in by_rank.values() for line in part]
        self.count = len(lines) + (self.count if epoch == self.epoch else 0)
        self.epoch = epoch
        if self.rank == 0:
            self.file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            for line in lines:
                log.warning("step %d: a sample is left out: %s", step, line["error"])
        if self.count > self.limit:
            raise DataError(
                f"data.max_bad: {self.count} samples of epoch {self.epoch} could not be read, and the limit is "
                f"{self.limit}; the last: {lines[-1]['error']}; {self.file.path} lists all"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "count": self.count, "file": self.file.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.count, self.saved = state["epoch"], state["count"], state["file"]


def allowed(share: float, samples: int) -> int:
    """Return how many of an epoch's samples may be bad."""
    return int(max(ALWAYS_ALLOWED, share * samples)) if share else 0


def replace_bad(micros: Iterator[Any]) -> Generator[Any]:
    """Yield micro-batches. One whose samples are all bad gets another one's batch, with weight 0.

    Raises:
        DataError: The first `ALWAYS_ALLOWED` micro-batches have no good sample.
    """
    waiting, last = [], None
    for micro in micros:
        if micro.batch is not None and not waiting:
            last = micro.batch
            yield micro
            continue
        last = last if micro.batch is None else micro.batch
        waiting.append(micro)
        if last is not None:
            yield from (micro._replace(batch=last) if micro.batch is None else micro for micro in waiting)
            waiting.clear()
        elif len(waiting) == ALWAYS_ALLOWED:
            raise DataError(micro.bad[0].why)
