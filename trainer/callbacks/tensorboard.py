"""Writes the numbers and the resolved config to `tensorboard/` in the run folder."""

from typing import TYPE_CHECKING, Any

from trainer.callback import Callback

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None

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
        for name, value in numbers.items():
            writer.add_scalar(name, value, trainer.step)

    def _open(self, trainer) -> Any:
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # takes most of a second to import, so not before the first step

        # A resume hides what an earlier process wrote past this step.
        self.writer = SummaryWriter(str(trainer.run_dir / "tensorboard"), purge_step=trainer.step)
        config = trainer.run_dir / "config.yaml"
        if config.exists():
            self.writer.add_text("config", "```yaml\n" + config.read_text() + "```", trainer.step)
        return self.writer
