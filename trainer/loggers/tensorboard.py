"""Writes numbers, media, the config and its settings to `tensorboard/` in the run's folder."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from trainer.context import Context
from trainer.files import Appended
from trainer.loggers.logger import Logger
from trainer.loggers.settings import settings_of
from trainer.metrics.media import Histogram, Image, prepared


class TensorBoard(Logger):
    """Writes TensorBoard's events without a thread. The thread of torch's SummaryWriter would slow the steps."""

    def __init__(self) -> None:
        self.file: Appended | None = None

    def on_media(self, trainer, media: Mapping[str, Any]) -> None:
        if trainer.rank:
            return
        self._open(trainer)
        for name, item in prepared(media):
            self._add(trainer.step, summary=self._summary(name, item))

    def on_fit_end(self, trainer) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, trainer: Context, numbers: dict[str, float]) -> None:
        self._open(trainer)
        scalars = [self.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(trainer.step, summary=self.Summary(value=scalars))

    def _add(self, step: int, **content: Any) -> None:
        self.records.write(self.Event(wall_time=time.time(), step=step, **content).SerializeToString())

    def _summary(self, name: str, item: str | Image | Histogram) -> Any:
        from torch.utils.tensorboard.summary import histogram_raw, text

        if isinstance(item, str):
            return text(name, item)
        if isinstance(item, Image):
            image = self.Summary.Image(
                height=item.height, width=item.width, colorspace=item.channels, encoded_image_string=item.png
            )
            return self.Summary(value=[self.Summary.Value(tag=name, image=image)])
        limits, counts = item.edges, [0, *item.counts]  # of a bin, its right edge; an empty bin ends at the first
        return histogram_raw(name, limits[0], limits[-1], sum(counts), item.total, item.squares, limits, counts)

    def _open(self, trainer: Context) -> None:
        if self.file is not None:
            return
        # Not before the first step: these imports take most of a second. Pyright does not see protobuf's classes.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import text

        self.Event, self.Summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = Appended(trainer.run_dir / "tensorboard" / name)
        self.records = RecordWriter(self.file)
        self._add(0, file_version="brain.Event:2")
        # A resume hides the events of later steps that an earlier process wrote.
        self._add(trainer.step, session_log=SessionLog(status=SessionLog.START))
        settings = settings_of(trainer)
        self._add(trainer.step, summary=hparams_pb(settings, trial_id=os.path.relpath(trainer.run_dir)))
        config = trainer.run_dir / "config.yaml"
        if config.exists():
            self._add(trainer.step, summary=text("config", "```yaml\n" + config.read_text() + "```"))
