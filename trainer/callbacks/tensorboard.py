"""Writes the numbers and the resolved config to `tensorboard/` in the run folder."""

from typing import Any

from trainer.callback import Callback


class TensorBoard(Callback):
    def __init__(self) -> None:
        self.writer: Any = None  # a torch.utils.tensorboard.SummaryWriter

    def on_step_end(self, trainer) -> None:
        if trainer.metrics:
            self._write(trainer, trainer.metrics)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self._write(trainer, metrics)

    def on_fit_end(self, trainer) -> None:
        if self.writer is not None:
            self.writer.close()

    def _write(self, trainer, numbers: dict[str, float]) -> None:
        if trainer.rank:
            return
        writer = self.writer or self._open(trainer)
        scalars = [self.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        writer.file_writer.add_summary(self.Summary(value=scalars), trainer.step)  # one event, not one a number

    def _open(self, trainer) -> Any:
        # These take most of a second to import, so not before the first step.
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] generated
        from torch.utils.tensorboard import SummaryWriter

        self.Summary = Summary
        # A resume hides what an earlier process wrote past this step.
        self.writer = SummaryWriter(str(trainer.run_dir / "tensorboard"), purge_step=trainer.step)
        config = trainer.run_dir / "config.yaml"
        if config.exists():
            self.writer.add_text("config", "```yaml\n" + config.read_text() + "```", trainer.step)
        return self.writer
