"""Notices changes of a data set of which data workers have copies."""

from collections.abc import Iterator
from typing import Any, TypeVar

from trainer.errors import ConfigError

T = TypeVar("T")


class Copies:
    """The numbers and texts that a data set has as attributes, also those of a data set that it wraps.

    Args:
        dataset: The data set, before workers copy it.
    """

    def __init__(self, dataset: Any) -> None:
        self.kept = [
            (part, name, value)
            for part in parts_of(dataset)
            for name, value in getattr(part, "__dict__", {}).items()
            if isinstance(value, str | int | float) and value == value  # NaN is no other NaN
        ]

    def unchanged(self, step: T) -> T:
        """Return the data of a step.

        Raises:
            ConfigError: User code has changed an attribute since.
        """
        for part, name, value in self.kept:
            if (now := vars(part).get(name, value)) != value:
                raise ConfigError(
                    f"{type(part).__name__}.{name}: was changed from {value!r} to {now!r} during the run, and data "
                    "workers have copies of the data set from before; give data.workers=0"
                )
        return step


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a data set, then what a Subset or a ConcatDataset is of."""
    yield dataset
    for inner in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if inner is not None:
            yield from parts_of(inner)
