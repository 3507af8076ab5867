"""Detects changes to a data set after its samples were read ahead, or after data workers were forked."""

from collections.abc import Iterator
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.log import log

T = TypeVar("T")


class Copies:
    """The numbers and strings among the attributes of a data set and of those that it wraps, before it is read."""

    def __init__(self, dataset: Any) -> None:
        self.kept = [
            (part, name, value)
            for part in parts_of(dataset)
            for name, value in getattr(part, "__dict__", {}).items()
            if isinstance(value, str | int | float) and value == value  # NaN is no other NaN
        ]

    def changed(self) -> str:
        """Describe the first attribute that user code has changed since; "" if there is none."""
        for part, name, value in self.kept:
            if (now := vars(part).get(name, value)) != value:
                return f"{type(part).__name__}.{name}: was changed from {value!r} to {now!r}"
        return ""

    def unchanged(self, step: T) -> T:
        """Return `step`, which workers have loaded; refuse a change since."""
        if change := self.changed():
            raise ConfigError(
                f"{change} during the run, and data workers have copies of the data set from before; "
                "give data.workers=0"
            )
        return step

    def refuse_before(self, step: int) -> None:
        """Refuse a change by a hook that runs before step `step` + 1; on a resume, log it instead.

        The first step of a new run would otherwise have other samples than later ones.
        """
        if (change := self.changed()) and step:
            log.warning("resume: %s by a hook, after the samples of the first step were read", change)
        elif change:
            raise ConfigError(
                f"{change} by a hook, after the samples of the first step were read; set it in recipe.data(), or in "
                "setup() of a LightningModule"
            )


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a data set, then those inside it, as in a Subset or a ConcatDataset."""
    yield dataset
    for inner in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if inner is not None:
            yield from parts_of(inner)
