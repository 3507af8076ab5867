"""Saves settings of the optimizer's groups that user code has changed during a run, such as a momentum."""

from typing import Any

from trainer.optim.probe import GROUP, steps_of
from trainer.optim.rates import other_groups

ELSEWHERE = ("params", "lr", "initial_lr")  # `Rates` saves the rates


class GroupSettings:
    """The settings of an optimizer's groups, except learning rates and numbers that its own steps change."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.made = self._settings()

    def _settings(self) -> list[dict[str, Any]]:
        kept = steps_of(self.optimizer).kept
        return [
            {
                name: value
                for name, value in group.items()
                if name not in ELSEWHERE and GROUP + name not in kept and isinstance(value, int | float | tuple)
            }
            for group in self.optimizer.param_groups
        ]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return each group's settings that differ from when the optimizer was made; empty if none do."""
        settings = self._settings()
        if len(settings) != len(self.made):
            raise other_groups("before this checkpoint")
        changed = [
            {name: value for name, value in now.items() if name in made and value != made[name]}
            for made, now in zip(self.made, settings, strict=True)
        ]
        return changed if any(changed) else []

    def load_state_dict(self, changed: list[dict[str, Any]]) -> None:
        """Restore changed settings. Raise ValueError for an unknown one, because the checkpoint may be untrusted."""
        for group, made, own in zip(self.optimizer.param_groups, self.made, changed, strict=True):
            for name, value in own.items():
                if name not in made or not isinstance(value, int | float | tuple):
                    raise ValueError(f"optimizer.param_groups has no setting {name}={value}")
                group[name] = value
