"""Writes checkpoints beside training: a copy of the state at a step's end, which a thread hashes and commits."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import training_state
from trainer.checkpoint import commit, compare, locate, retention
from trainer.checkpoint.fence import Attempt, refuse_superseded
from trainer.checkpoint.lock import lock, unlock
from trainer.checkpoint.serialize import Packed
from trainer.checkpoint.snapshot import Snapshot
from trainer.errors import ConfigError
from trainer.log import log
from trainer.run_dir import CHECKPOINTED

if TYPE_CHECKING:
    from trainer.trainer import Trainer


EXPORT_S = 86400.0  # a recipe's export may take as long as it takes


class Saver:
    """One checkpoint at a time is being written, by rank 0; the other ranks hand over what is theirs.

    A failed write is logged and training goes on, the older checkpoints are still there, until `max_failures` in a row.
    A process that ends by itself waits for the thread: the interpreter joins those of an executor.
    """

    def __init__(self, trainer: "Trainer") -> None:
        """Raises:
        ConfigError: another process writes this run.
        """
        self.trainer, self.options = trainer, trainer.options.checkpoint
        self.folder = training_state.saved_in(trainer)
        self.attempt = self._claim() if trainer.rank == 0 else None
        self.settings = compare.own(trainer)  # and what the config says, where a command has made the trainer
        self.snapshot = Snapshot()
        self.thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        self.writing: Future[Path | OSError] | None = None
        self.room: Future[None] | None = None  # when there is memory for the first copy
        self.steps = 0  # of this process
        self.asked = self.step = -1  # when one was asked for, and of what is or was written last
        self.best = self.noted = dict[str, Any]()  # the best that is written, and with what is being written
        self.error: OSError | None = None  # of the last that is settled
        self.failures = 0  # in a row
        self.closing = False

    def save(self, last: bool = False) -> None:
        """Write a checkpoint of this step, unless there is one; the last is waited for. A collective.

        Raises:
            ConfigError: the last one can't be written; not where a signal has asked for it, and there is one before.
        """
        trainer = self.trainer
        trainer.emit("on_flush")
        trainer.saved_at = time.monotonic()
        trainer.seconds = trainer.saved_at - trainer.started
        if self.asked != trainer.step:
            self.asked = trainer.step
            if self._meet(waits=trainer.rank == 0 and (last or self._is_free())):
                ranks = training_state.rank_states(trainer)
                if trainer.rank == 0:
                    self._begin(ranks)
        if last:
            self._meet(waits=True)
            trainer.heartbeat.beat(patience_s=EXPORT_S)  # rank 0 may have something to export
            if self.error and trainer.stop_reason == "signal" and (older := locate.checkpoints(self.folder)):
                log.error("the last step, %d, is in no checkpoint; %s is the newest", trainer.step, older[-1])
            elif self.error:
                raise self._refusal(f"the checkpoint of the last step, {self.step}, failed")

    def check(self) -> None:
        """At a step's end.

        Raises:
            ConfigError: too many checkpoints in a row have failed.
        """
        self.steps += 1
        if self.steps == 2 and self.asked < 0 and self.trainer.rank == 0:  # overlap has made the first one now
            self.room = self.thread.submit(self.snapshot.reserve, training_state.tensors(self.trainer))
        if self.writing is not None and self.writing.done():
            self._settle()
        if self.failures >= self.options.max_failures and not self.trainer.stop_reason:  # else the last one decides
            raise self._refusal(f"{self.failures} checkpoints in a row failed")

    def close(self) -> None:
        """Waits for what is being written, and lets others write the run."""
        self.closing = True
        self._moved()
        self.thread.shutdown()
        if self.writing is not None and self.writing.exception() is None:
            self._settle()
        self.trainer.heartbeat.beat()
        self._let_go()

    def _moved(self) -> None:
        """With each piece that is written: who waits for this process to end sees by it a slow disk from one that
        hangs. Otherwise training is what has to move."""
        if self.closing and self.writing is not None:
            self.trainer.heartbeat.beat(busy=True)

    def _claim(self) -> Attempt:
        with ExitStack() as refused:
            refused.callback(self._let_go)
            lock(self.folder)
            lock(self.trainer.run_dir, "trainer.run_dir")  # another may save elsewhere
            attempt = commit.begin(self.folder)
            refused.pop_all()
        return attempt

    def _let_go(self) -> None:
        unlock(self.folder)
        unlock(self.trainer.run_dir)

    def _is_free(self) -> bool:
        """Whether a checkpoint can be begun, or is worth waiting for. A validated step's, maybe the best, always is."""
        step, writing = self.trainer.step, self.writing is not None and not self.writing.done()
        if writing and self.options.when_busy == "skip" and self.trainer.validated_step != step:
            log.warning("checkpoint of step %d left out: that of step %d is still being written", step, self.step)
            return False
        return True

    def _meet(self, waits: bool) -> bool:
        """All ranks go on together; where rank 0 `waits`, when nothing is being written any more. It tells the others
        again and again, for each of their waits has a limit: a host that is gone is noticed. Returns whether it waits
        at all. A collective."""
        began, wanted, busy = time.monotonic(), 0, 1
        while busy:
            if waits and self.writing is not None and wait([self.writing], self.trainer.options.timeout_s / 4).done:
                self._settle()
            wanted, busy = self.trainer.ranks.agree((int(waits), int(waits and self.writing is not None)))()
            self.trainer.heartbeat.beat()
        if waits and (waited := time.monotonic() - began) > 1.0 and not self.trainer.stop_reason:
            log.warning("waited %.1f s for the checkpoint of step %d to be written", waited, self.step)
        return wanted > 0

    def _begin(self, ranks: dict[str, Packed]) -> None:
        if self.room is not None:
            self.room.result()
        files = self.snapshot.take(training_state.state_dict(self.trainer), ranks)
        self.step, self.noted = self.trainer.step, self.trainer.best
        self.writing = self.thread.submit(self._write, self.step, files, training_state.manifest(self.trainer, ranks))

    def _settle(self) -> None:
        """Takes what became of the one that was being written."""
        assert self.writing is not None
        written = self.writing.result()  # raises what is our own mistake
        self.writing = None
        if isinstance(written, OSError):
            self.failures, self.error = self.failures + 1, written
            if self.options.keep_best and self.trainer.best.get("step") == self.step:
                self.trainer.best = self.best
        else:
            self.failures, self.error, self.best, self.trainer.checkpoint = 0, None, self.noted, written

    def _write(self, step: int, files: dict[str, memoryview], manifest: dict[str, Any]) -> Path | OSError:
        assert self.attempt is not None  # it is rank 0's
        self.snapshot.wait()
        try:
            written = commit.commit(self.folder, step, files, manifest, self.attempt, self._moved)
        except OSError as error:
            log.error("checkpoint of step %d failed, training goes on: %s", step, error)
            return error
        with _told(f"checkpoint of step {step} is written, but the run's folder does not say so"):
            (self.trainer.run_dir / CHECKPOINTED).touch()
        with _told(f"checkpoint of step {step} is written, but {locate.LAST} does not lead to it"):
            commit.publish(written, self.attempt)
        with _told(f"checkpoint of step {step} is written, but older ones can't be removed"):
            refuse_superseded(self.folder, self.attempt)
            retention.retain(self.folder, self.options.keep, self.options.keep_best, self.options.keep_every)
        return written

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"trainer.checkpoint.dir={self.options.dir}: {what}: {self.error}; mend that and go on from the one before "
            f"by trainer.resume={self.folder}"
        )


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", what, error)


def _give_way() -> None:
    """This thread gets what others leave of the processor, and a tenth where they would leave nothing."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
