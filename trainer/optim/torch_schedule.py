"""Learning rates from torch's LRSchedulers, which step an optimizer without real parameters.

Rates are still a function of the step: a resume steps the schedulers again from the beginning.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from trainer.optim.schedule import Rate

FOLLOWS = "follows"  # key of a trained group: the index of the schedulers' group whose settings it follows
SETTINGS = ("momentum", "betas")  # settings that torch's schedulers change, in addition to `lr`


class TorchRate(Rate):
    """The rates that schedulers give the groups of `optimizer`, whose parameters are never read.

    `due` returns the `step` of each scheduler to call after this many finished steps, in order.
    """

    def __init__(self, optimizer: Optimizer, due: Callable[[int], Iterable[Callable[[], object]]]) -> None:
        self.optimizer, self.due, self.done = optimizer, due, 0
        vars(optimizer)["_opt_called"] = True  # else torch warns that the optimizer does not step
        self.bases = [base_rate(group) for group in optimizer.param_groups]

    def __call__(self, step: int) -> float:
        """Return the factor on the rates of groups that follow the first group."""
        for done in range(self.done + 1, step + 1):
            for step_scheduler in self.due(done):
                step_scheduler()
        self.done = max(self.done, step)
        return self.optimizer.param_groups[0]["lr"] / (self.bases[0] or 1.0)

    def put(self, step: int, groups: Sequence[dict[str, Any]], peaks: Sequence[float]) -> None:
        self(step)
        for group, peak in zip(groups, peaks):
            number = group.get(FOLLOWS, 0)
            now, base = self.optimizer.param_groups[number], self.bases[number]
            group["lr"] = now["lr"] if peak == base else peak * now["lr"] / (base or 1.0)
            if FOLLOWS in group:
                group.update((key, now[key]) for key in SETTINGS if key in now)


def base_rate(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))
