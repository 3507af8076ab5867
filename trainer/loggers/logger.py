"""The base class of loggers, which write a run's numbers to one more place."""

from trainer.callback import Callback, only_logged
from trainer.context import Context


class Logger(Callback):
    """Receives the numbers of logged steps and validations on rank 0. A subclass defines `write`."""

    @only_logged
    def on_step_end(self, trainer) -> None:
        if trainer.rank == 0:
            self.write(trainer, trainer.metrics)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        if trainer.rank == 0:
            self.write(trainer, metrics)

    def row(self, trainer: Context, numbers: dict[str, float]) -> dict[str, float]:
        """Return the numbers, preceded by the step, samples and seconds."""
        return {"step": trainer.step, "samples": trainer.samples, "seconds": round(trainer.seconds, 3), **numbers}

    def write(self, trainer: Context, numbers: dict[str, float]) -> None:
        """Write the numbers of step `trainer.step`, by name."""
        raise NotImplementedError
