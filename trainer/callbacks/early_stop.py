"""Ends the run when a validation metric has not improved for `patience` validations in a row."""

import math
from typing import Any, Literal

from trainer.annotated import NonNegativeFloat, PositiveInt
from trainer.callback import Callback
from trainer.checks.callback import check_watched
from trainer.context import Context


class EarlyStop(Callback):
    """Stops a run whose metric no longer improves. Metrics agree on all ranks, so all stop at the same step."""

    def __init__(
        self,
        metric: str = "val/loss",
        patience: PositiveInt = 3,
        min_delta: NonNegativeFloat = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best, self.best_step, self.bad = math.inf, 0, 0

    def on_fit_start(self, trainer) -> None:
        check_watched("early_stop", trainer.plan, self.metric, self.mode)
        self._stop_if_due(trainer)  # a resumed run may have been stopped already

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        value = metrics.get(self.metric, math.nan) * (1 if self.mode == "min" else -1)  # absent: its count was 0
        improved = value < self.best - self.min_delta
        self.bad = 0 if improved else self.bad + 1
        if improved:
            self.best, self.best_step = value, trainer.step
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Context) -> None:
        if self.bad >= self.patience:
            best = self.best if self.mode == "min" else -self.best
            when = f" at step {self.best_step}" if self.best_step else ""
            message = "it was never finite" if self.best == math.inf else f"its best was {best:.4g}{when}"
            trainer.stop(f"early_stop: {self.metric} has not improved for {self.patience} validations; {message}")

    def decisions(self) -> dict[str, Any]:
        return {"bad": self.bad}

    def has_ended(self, decisions: Any) -> bool:
        bad = decisions.get("bad") if isinstance(decisions, dict) else None
        return isinstance(bad, int) and bad >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad = state["best"], state["bad"]
        self.best_step = state.get("best_step", 0)  # older checkpoints have none
