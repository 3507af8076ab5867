"""Limits data to its first batches: for a quick look, and to see whether a model can learn a few samples by heart."""

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.data.source import Samples, Several
from trainer.errors import ConfigError


def first_batches(source: Any, batches: int | None, batch: int, key: str) -> Any:
    """Return the data without what follows its first `batches`, whose samples are the first of the stored order.

    Args:
        batches: None keeps the data whole.
        batch: The samples of a batch.
        key: The setting, for errors.

    Raises:
        ConfigError: Training data has no samples by number, or is a mixture.
    """
    if batches is None or source is None:
        return source
    if isinstance(source, Samples) and not source.mixed:
        return first_samples(source, batches * batch)
    kind = "a mixture" if isinstance(source, Samples) else "an iterable of batches"
    raise ConfigError(
        f"{key}={batches}: recipe.data('train') is {kind}, which has no first samples; give trainer.max_steps instead, "
        "or return a Dataset"
    )


def first_validation(source: Any, batches: int | None, batch: int) -> Any:
    """Return validation data without what follows its first `batches`. Each rank counts its iterable's own."""
    if batches is None or source is None:
        return source
    if isinstance(source, Several):
        return Several({name: first_validation(part, batches, batch) for name, part in source.items()})
    return first_samples(source, batches * batch) if isinstance(source, Samples) else FirstOf(source, batches)


def first_samples(source: Samples, most: int) -> Samples:
    """Return the first `most` samples, or all if there are fewer."""
    before = [0, *itertools.accumulate(source.counts)]
    counts = [min(count, most - start) for count, start in zip(source.counts, before, strict=False) if start < most]
    fingerprint = hashlib.sha256(f"{source.fingerprint} first {most}".encode()).hexdigest()
    return Samples(source.reader, counts, fingerprint, source.transform, source.seed)


@dataclass(frozen=True)
class FirstOf:
    """The first `batches` of an iterable, which `Loader.validate` walks."""

    source: Iterable[Any]
    batches: int
