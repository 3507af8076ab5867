"""Takes torchmetrics' objects from a recipe's metrics: the recipe updates them, a validation computes them."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainer.errors import ConfigError, DataError

METHODS = ("update", "compute", "reset")  # of `torchmetrics.Metric`, which is not imported


class MetricObjects:
    """The objects of one validation data set, by name. `compute` of torchmetrics adds up the states of all ranks.

    Args:
        refusal: The reason why this run can't have such objects; empty if it can.
    """

    def __init__(self, refusal: str) -> None:
        self.refusal = refusal
        self.objects: dict[str, Any] = {}

    def reset(self) -> None:
        """Forget the batches of the validation before."""
        for metric in self.objects.values():
            metric.reset()

    def take(self, prefix: str, found: Any) -> Any:
        """Return what `recipe.metrics` returned for a batch, without the objects.

        Raises:
            ConfigError: This run can't have objects.
        """
        own = {name: value for name, value in found.items() if is_object(value)} if isinstance(found, Mapping) else {}
        if own and self.refusal:
            name, value = next(iter(own.items()))
            kind = type(value).__name__
            raise ConfigError(
                f"recipe.metrics(): returned a {kind} for {name!r}, and {self.refusal}; return (sum, count)"
            )
        self.objects |= {f"{prefix}/{name}": value for name, value in own.items()}
        return {name: value for name, value in found.items() if name not in own} if own else found

    def compute(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return the value of each object over the batches of all ranks. A collective.

        Raises:
            DataError: A rank has had no batch, so it does not know the objects.
            ConfigError: A value is not one number.
        """
        names = gather(sorted(self.objects))
        if any(own != names[0] for own in names):
            rank = min(range(len(names)), key=lambda rank: len(names[rank]))
            raise DataError(
                f"recipe.data('val'): rank {rank} has no batch, and torchmetrics' objects need one on each rank; "
                "return more validation data, or (sum, count)"
            )
        values: dict[str, float] = {}
        for name in names[0]:
            value = self.objects[name].compute()
            named = (
                {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
            )
            for key, one in named.items():
                if not isinstance(one, Tensor) or one.numel() != 1:
                    kind = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
                    raise ConfigError(
                        f"recipe.metrics(): {key} computes {kind}; give an object that computes one number"
                    )
                values[key] = float(one)
        self.reset()  # `evaluate` and a further validation may have objects of the same recipe
        return values


def is_object(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in METHODS)
