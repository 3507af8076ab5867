"""Detects changes to a data set whose samples are read ahead, or of which data workers have copies."""

from collections.abc import Iterator
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.log import log

T = TypeVar("T")


class Copies:
    """The numbers and texts among the attributes of a data set, and of data sets that it wraps.

    Args:
        dataset: The data set, before samples are read.
    """

    def __init__(self, dataset: Any) -> None:
        self.kept = [
            (part, name, value)
            for part in parts_of(dataset)
            for name, value in getattr(part, "__dict__", {}).items()
            if isinstance(value, str | int | float) and value == value  # NaN is no other NaN
        ]

    def changed(self) -> str:
        """Describe the first attribute that user code has changed since then; empty if none has changed."""
        for part, name, value in self.kept:
            if (now := vars(part).get(name, value)) != value:
                return f"{type(part).__name__}.{name}: was changed from {value!r} to {now!r}"
        return ""

    def unchanged(self, step: T) -> T:
        """Return a step that workers have loaded.

        Raises:
            ConfigError: User code has changed an attribute since then.
        """
        if what := self.changed():
            raise ConfigError(
                f"{what} during the run, and data workers have copies of the data set from before; give data.workers=0"
            )
        return step

    def refuse_before(self, step: int) -> None:
        """Refuse a change by a hook that runs before step `step` + 1; on a resume, log it instead.

        Raises:
            ConfigError: A new run would read other samples in its first step than in later ones.
        """
        if (what := self.changed()) and step:
            log.warning("resume: %s by a hook, and the samples of the first step were read before", what)
        elif what:
            raise ConfigError(
                f"{what} by a hook, and the samples of the first step were read before; set it in recipe.data(), or in "
                "setup() of a LightningModule"
            )


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a data set, then the data sets inside a Subset or a ConcatDataset."""
    yield dataset
    for inner in (getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())):
        if inner is not None:
            yield from parts_of(inner)
