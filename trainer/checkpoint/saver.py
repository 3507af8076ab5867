"""Writes checkpoints during training: copies the state at the end of a step; a thread hashes and writes the copy."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint import commit, locate, retention
from trainer.checkpoint.fence import Attempt, refuse_superseded, see_attempt
from trainer.checkpoint.lock import Claim
from trainer.checkpoint.manifest import Entries
from trainer.checkpoint.parts import part_section
from trainer.checkpoint.serialize import rank_section
from trainer.checkpoint.snapshot import Snapshot
from trainer.comm.phases import Phase, during
from trainer.comm.ranks import Ranks
from trainer.config.options import CheckpointOptions
from trainer.errors import ConfigError
from trainer.log import log
from trainer.process.heartbeat import Heartbeat


class State(NamedTuple):
    """One rank's part of a checkpoint: sections of tensors and plain values."""

    common: dict[str, Any]  # shared by all ranks, on rank 0; empty on the others
    own: dict[str, Any]  # this rank's own
    manifest: dict[str, Any]  # JSON, from rank 0
    parts: dict[str, Any] = {}  # this rank's parts of `parts.SECTIONS`; empty on all ranks or on none


class Saver:
    """Writes one checkpoint at a time: rank 0 the common state and, if `shared`, each rank its own.

    A failed write is logged, and training continues until `max_failures` writes in a row have failed. On exit the
    interpreter joins the thread, so a checkpoint that is being written is completed. `claim` is rank 0's.

    Raises:
        ConfigError: Ranks have their own states, but don't see the same folder.
    """

    def __init__(
        self,
        folder: Path,
        options: CheckpointOptions,
        ranks: Ranks,
        heartbeat: Heartbeat,
        claim: Claim | None,
        shared: bool = False,
    ) -> None:
        self.folder, self.options, self.ranks, self.heartbeat, self.claim = folder, options, ranks, heartbeat, claim
        self.attempt = claim.attempt if claim else Attempt(0, "")
        self.shares = shared and ranks.world > 1
        self.snapshot, self.own, self.parts = Snapshot(), Snapshot(), Snapshot()
        self.thread = ThreadPoolExecutor(1, "checkpoint", _lower_priority)
        self.writing: Future[Path | Entries | OSError] | None = None
        self.staging = False  # ranks stage their files; rank 0 commits when all ranks have staged
        self.polling: Callable[[], tuple[int, ...]] | None = None  # returns the number of ranks that have staged
        self.reserving: Future[None] | None = None  # done once memory for the first copy is allocated
        self.requested = -1  # the last step for which a checkpoint was requested
        self.step = -1  # the step of the checkpoint that was begun last
        self.manifest: dict[str, Any] = {}  # that checkpoint's manifest
        self.newest: Path | None = None  # the newest checkpoint that this process has written
        self.failed: set[int] = set()  # steps whose checkpoint failed
        self.error: OSError | None = None  # the error of the last finished write; None if it succeeded
        self.failures = 0  # consecutive failed writes
        self.closing = False
        self.on_settled: Callable[[dict[str, Any]], Any] = lambda facts: None  # called on rank 0 after each write
        self.began_at, self.stall_s, self.written_at = 0.0, 0.0, 0.0  # times of the checkpoint that was begun last
        if self.shares:
            self._refuse_other_disks()

    def reserve(self, common: dict[str, Any], parts: dict[str, Any]) -> None:
        """Allocate memory for such a state in the thread, unless a checkpoint has already been requested."""
        if self.requested < 0 and (common or parts):
            self.reserving = self.thread.submit(self._reserve, common, parts)

    def save(
        self,
        step: int,
        state: Callable[[], State],
        last: bool = False,
        must: bool = False,
        stopped: bool = False,
        saved: bool = False,
    ) -> None:
        """Write a checkpoint of this step unless one was requested; if it is the `last`, wait for it. A collective.

        Args:
            must: Don't skip this checkpoint while another one is being written.
            stopped: A signal ends the run, so the last checkpoint may fail if there is an older one to restart from.
            saved: An equal checkpoint of this step exists already.

        Raises:
            ConfigError: The last checkpoint can't be written.
        """
        if self.requested != step:
            self.requested, began = step, time.monotonic()
            begins = self.ranks.rank == 0 and not saved and (last or must or self._is_free(step))
            if self._finish_writing(begins, warns=not last):
                self._begin(step, state())
                self.began_at, self.stall_s = began, time.monotonic() - began
        if last:
            self._finish_writing(waits=True, warns=False)
            self._refuse_lost(step, stopped)

    def check(self, ends: bool = False) -> None:
        """Process the result of a checkpoint at the end of a step. A collective while ranks write their own files.

        Raises ConfigError if too many checkpoints in a row have failed, unless the run `ends`: then only the last
        counts.
        """
        if self.staging:
            self._poll()
        elif self.writing is not None and self.writing.done():
            self._settle()
        if self.failures >= self.options.max_failures and not ends:
            raise self._refusal(f"{self.failures} checkpoints in a row failed")

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and release the run. Discard files that are being staged."""
        self.closing = True
        if not self.staging:
            self._moved()
        self.thread.shutdown()
        if self.staging and self.claim:
            commit.discard(self.folder, self.step, self.attempt)
        elif self.writing is not None and not self.staging and self.writing.exception() is None:
            self._settle()
        self.heartbeat.beat()
        if self.claim:
            self.claim.close()

    def _moved(self) -> None:
        """Write a heartbeat after each piece once the process closes, so that a slow disk doesn't look like a hang."""
        if self.closing and self.staging:
            raise OSError(errno.ECANCELED, "the run ended before all ranks had written their files")
        if self.closing and self.writing is not None:
            self.heartbeat.beat(busy=True)  # before the end, only steps do so

    def _refuse_other_disks(self) -> None:
        self.attempt = Attempt(*self.ranks.first(self.attempt))
        seen = self.ranks.each(see_attempt(self.folder, self.attempt))
        if blind := [str(rank) for rank, sees in enumerate(seen) if not sees]:
            raise ConfigError(
                f"trainer.checkpoint.dir={self.options.dir}: rank {', '.join(blind)} does not see rank 0's "
                f"{self.folder}, into which each rank writes a file; give all ranks the same folder, on a shared disk"
            )

    def _is_free(self, step: int) -> bool:
        writing = self.writing is not None and (self.staging or not self.writing.done())
        if writing and self.options.when_busy == "skip":
            text = "checkpoint of step %d is skipped: the checkpoint of step %d is still being written"
            log.warning(text, step, self.step)
            return False
        return True

    def _finish_writing(self, waits: bool, warns: bool) -> bool:
        """Return rank 0's `waits`. If it is true, all ranks wait until nothing is being written. A collective.

        The ranks exchange their states every quarter of the timeout, so that no collective times out.
        """
        began, waiting, busy = time.monotonic(), waits, True
        if self.polling is not None:
            self.polling()  # the votes below replace its result
            self.polling = None
        while busy:
            if waiting and self.writing is not None:
                over = wait([self.writing], self.ranks.timeout.total_seconds() / 4).done
                if over and not self.staging:
                    self._settle()
            done = self.staging and self.writing is not None and self.writing.done()
            votes = (int(waits), int(waits and self.writing is not None), int(done))
            waiting, busy, staged = self.ranks.agree(votes)()
            self.heartbeat.beat()
            if waiting and staged == self.ranks.world:
                self._gather_staged()
        if waits and warns and (waited := time.monotonic() - began) > 1.0:
            log.warning("waited %.1f s for the checkpoint of step %d to be written", waited, self.step)
        return waiting > 0

    def _begin(self, step: int, state: State) -> None:
        if self.reserving is not None:
            self.reserving.result()
        files: dict[str, memoryview] = self.snapshot.take(state.common) if state.common else {}
        for section, value, snapshot in (
            (rank_section(self.ranks.rank), state.own, self.own),
            (part_section(self.ranks.rank), state.parts, self.parts),
        ):
            if value:
                files |= snapshot.take({section: value}, f"{section}.json")
        self.step, self.manifest = step, state.manifest
        self.staging = self.shares and self.ranks.agree((int(bool(state.own or state.parts)),))()[0] > 0
        if self.staging:
            self.writing = self.thread.submit(self._stage, step, files)
        elif self.claim:
            self.writing = self.thread.submit(self._commit, step, files)

    @during(Phase.CHECKPOINT)
    def _poll(self) -> None:
        """Count the ranks that have staged their files, by a collective that runs during the next step."""
        assert self.writing is not None
        if self.polling is not None and self.polling()[0] == self.ranks.world:
            self.polling = None
            self._gather_staged()
        else:
            self.polling = self.ranks.agree((int(self.writing.done()),))

    def _gather_staged(self) -> None:
        """Gather the entries of all staged files, or the errors, on rank 0. A collective."""
        assert self.writing is not None
        staged = self.writing.result()  # raises any error but an OSError: a bug
        self.staging, self.writing = False, None
        parts = self.ranks.gather(staged if isinstance(staged, dict) else str(staged))
        if self.claim:
            self.writing = self.thread.submit(self._commit_staged, self.step, parts)

    @during(Phase.CHECKPOINT)
    def _settle(self) -> None:
        assert self.writing is not None
        written = self.writing.result()  # raises any error but an OSError: a bug
        self.writing = None
        if isinstance(written, OSError):
            self.failures, self.error = self.failures + 1, written
            self.failed.add(self.step)
            self.on_settled({"step": self.step, "error": str(written)})
        elif isinstance(written, Path):
            self.failures, self.error, self.newest = 0, None, written
            times = {"seconds": round(self.written_at - self.began_at, 4), "stall": round(self.stall_s, 4)}
            self.on_settled({"step": self.step, **times, "bytes": self.bytes})

    def _stage(self, step: int, files: dict[str, memoryview]) -> Entries | OSError:
        self._wait_for_copies()
        try:
            return commit.stage(self.folder, step, files, self.attempt, self._moved)
        except OSError as error:
            return error

    def _commit_staged(self, step: int, parts: list[Entries | str]) -> Path | OSError:
        failed = [f"rank {rank}: {part}" for rank, part in enumerate(parts) if isinstance(part, str)]

        def staged() -> Path:
            if failed:
                commit.discard(self.folder, step, self.attempt)
                raise OSError("; ".join(failed))
            entries = [part for part in parts if isinstance(part, dict)]
            return commit.commit_staged(self.folder, step, entries, self.manifest, self.attempt)

        return self._publish(step, staged)

    def _commit(self, step: int, files: dict[str, memoryview]) -> Path | OSError:
        self._wait_for_copies()
        return self._publish(
            step, lambda: commit.commit(self.folder, step, files, self.manifest, self.attempt, self._moved)
        )

    def _publish(self, step: int, committed: Callable[[], Path]) -> Path | OSError:
        try:
            written = committed()
        except OSError as error:
            log.error("checkpoint of step %d failed, training continues: %s", step, error)
            return error
        assert self.claim
        self.written_at, self.bytes = time.monotonic(), size_of(written)
        with _warned(f"checkpoint of step {step} is written, but not recorded in the run's folder"):
            self.claim.mark()
        with _warned(f"checkpoint of step {step} is written, but {locate.LAST} does not point to it"):
            commit.publish(written, self.attempt)
        with _warned(f"checkpoint of step {step} is written, but {locate.BEST} does not point to the best one"):
            refuse_superseded(self.folder, self.attempt)
            retention.link_best(self.folder, self.options.keep_best)
        with _warned(f"checkpoint of step {step} is written, but older ones can't be removed"):
            refuse_superseded(self.folder, self.attempt)
            retention.retain(self.folder, self.options.keep, self.options.keep_best, self.options.keep_every)
        return written

    def _refuse_lost(self, step: int, stopped: bool) -> None:
        """Raise on all ranks if the last checkpoint is missing. A collective: only rank 0 knows of a failure."""
        refusal = ""
        if self.error and stopped and (older := locate.checkpoints(self.folder)):
            log.error("the last step, %d, is in no checkpoint; %s is the newest", step, older[-1])
        elif self.error:
            refusal = str(self._refusal(f"the checkpoint of the last step, {self.step}, failed"))
        if refusal := self.ranks.gather(refusal)[0]:
            raise ConfigError(refusal)

    def _reserve(self, common: dict[str, Any], parts: dict[str, Any]) -> None:
        self.snapshot.reserve(common)
        self.parts.reserve({part_section(self.ranks.rank): parts})

    def _wait_for_copies(self) -> None:
        for snapshot in (self.snapshot, self.own, self.parts):
            snapshot.wait()

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"trainer.checkpoint.dir={self.options.dir}: {what}: {self.error}; fix the cause, then resume from "
            f"the previous checkpoint with trainer.resume={self.folder}"
        )


@contextmanager
def _warned(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", what, error)


def size_of(folder: Path) -> int:
    """Return the total bytes of the files in a folder; files that vanish meanwhile don't count."""
    total = 0
    for file in folder.iterdir():
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _lower_priority() -> None:
    """Lower this thread's priority, so that other threads get nine tenths of the processor."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
