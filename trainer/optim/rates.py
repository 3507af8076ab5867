"""Sets each step's learning rates in the optimizer's groups, and follows rates that user code sets."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from trainer.errors import ConfigError
from trainer.optim.schedule import Rate

RATE = itemgetter("lr")


class Rates:
    """The learning rates of an optimizer's groups, which have peak rates at first.

    If the run was `resumed`, rates that hooks set before its first step are ignored, because the checkpoint includes
    them.
    """

    def __init__(self, rate: Rate, optimizer: Any, resumed: bool = False) -> None:
        self.rate, self.optimizer = rate, optimizer
        self.peaks: list[float] = list(map(RATE, optimizer.param_groups))
        self.given = [] if resumed else list(self.peaks)  # rates of the last step; empty if unknown
        self.settled = False  # the schedule changes no more rates after this step
        self.by_hand = False

    def put(self, step: int) -> None:
        """Set a step's rates. Refuse new or removed groups, and rates that both user code and the schedule set."""
        groups = self.optimizer.param_groups
        if self.given and list(map(RATE, groups)) != self.given:
            self._follow(step, groups)
        self.rate.put(step, groups, self.peaks)
        self.given, self.settled = list(map(RATE, groups)), self.rate.is_constant(step + 1)

    def state_dict(self) -> list[float]:
        """Return the peak rates if user code has set a rate; else empty, because they are the optimizer's settings.

        They include rates that were set since the last step, as after a validation.
        """
        if self.settled:
            self._take(self.optimizer.param_groups)
        return self.peaks if self.by_hand else []

    def load_state_dict(self, peaks: list[float]) -> None:
        self.peaks, self.by_hand = [float(peak) for _, peak in zip(self.peaks, peaks, strict=True)], True

    def _follow(self, step: int, groups: list[dict[str, Any]]) -> None:
        if len(groups) != len(self.peaks):
            raise other_groups(f"before step {step + 1}")
        changed = [i for i, (group, given) in enumerate(zip(groups, self.given, strict=True)) if group["lr"] != given]
        if changed and not self.rate.is_constant(step):
            i = changed[0]
            raise ConfigError(
                f"optimizer.param_groups[{i}]['lr']={groups[i]['lr']:g}: was set by hand before step {step + 1}, and "
                "the schedule sets the rate at each step; use a schedule alone, or schedule=constant"
            )
        self._take(groups)

    def _take(self, groups: Sequence[dict[str, Any]]) -> None:
        """Scale the peaks of groups whose rate was set by hand."""
        for i, (group, given) in enumerate(zip(groups, self.given)):
            if group["lr"] != given:
                self.peaks[i], self.by_hand = self.peaks[i] * group["lr"] / given if given else group["lr"], True
                self.given[i] = group["lr"]


def other_groups(when: str) -> ConfigError:
    return ConfigError(
        f"optimizer: a group was added or removed {when}, and a resume would not know of it; put all parameters into "
        "groups at the start, where they may be frozen"
    )
