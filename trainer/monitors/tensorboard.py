"""Writes the numbers and the config to `tensorboard/` in the run's folder."""

import os
import socket
import time
from typing import Any

from trainer.callback import Callback, TrainerProtocol, only_logged
from trainer.files import Appended


class TensorBoard(Callback):
    """A writer of TensorBoard's events without a thread. The thread of torch's SummaryWriter would slow the steps."""

    def __init__(self) -> None:
        self.file: Appended | None = None

    @only_logged
    def on_step_end(self, trainer) -> None:
        self._write(trainer, trainer.metrics)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self._write(trainer, metrics)

    def on_fit_end(self, trainer) -> None:
        if self.file is not None:
            self.file.close()

    def _write(self, trainer: TrainerProtocol, numbers: dict[str, float]) -> None:
        if trainer.rank:
            return
        if self.file is None:
            self._open(trainer)
        scalars = [self.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(trainer.step, summary=self.Summary(value=scalars))

    def _add(self, step: int, **content: Any) -> None:
        self.records.write(self.Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def _open(self, trainer: TrainerProtocol) -> None:
        # Not before the first step: these imports take most of a second. Pyright does not see protobuf's classes.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import text

        self.Event, self.Summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = Appended(trainer.run_dir / "tensorboard" / name)
        self.records = RecordWriter(self.file)
        self._add(0, file_version="brain.Event:2")
        # A resume hides the events of later steps that an earlier process wrote.
        self._add(trainer.step, session_log=SessionLog(status=SessionLog.START))
        config = trainer.run_dir / "config.yaml"
        if config.exists():
            self._add(trainer.step, summary=text("config", "```yaml\n" + config.read_text() + "```"))
