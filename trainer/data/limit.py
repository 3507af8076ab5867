"""Limits data to its first batches: for a quick check, or to see whether a model can memorise a few samples."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trainer.data.source import Samples, Several, is_used_up
from trainer.data.torch_loader import batches_in
from trainer.errors import ConfigError


@dataclass(frozen=True)
class FirstOf:
    """The first `batches` of an iterable in each pass. Each rank counts its own."""

    source: Iterable[Any]
    batches: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.source), self.batches)

    def batches_in(self, ranks: int) -> int | None:
        whole = batches_in(self.source, ranks)
        return None if whole is None else min(whole, self.batches)

    @property
    def fingerprint(self) -> str:
        """Distinguish different limits, because an iterable's content is unknown."""
        return f"iterable first {self.batches}"


def first_batches(source: Any, batches: int | None, batch: int, micros: int, key: str) -> Any:
    """Return the first `batches` of training data.

    Samples are the first ones in the stored order. An iterable is restarted after its first batches.

    Args:
        batches: None returns all data.
        batch: Samples per batch.
        micros: Batches of a rank's iterable that make up one batch.
        key: The setting, for errors.

    Raises:
        ConfigError: An iterable can't be restarted.
    """
    if batches is None or source is None:
        return source
    if isinstance(source, Samples):
        return first_samples(source, batches * batch)
    if is_used_up(source):
        raise ConfigError(
            f"{key}={batches}: recipe.data('train') is a {type(source).__name__}, which can be iterated only once; "
            "give trainer.max_steps instead, or return an object whose __iter__ starts over"
        )
    return FirstOf(source, batches * micros)


def first_validation(source: Any, batches: int | None, batch: int) -> Any:
    """Return the first `batches` of validation data. Each rank counts the batches of its own iterable."""
    if batches is None or source is None:
        return source
    if isinstance(source, Several):
        return Several({name: first_validation(part, batches, batch) for name, part in source.items()})
    return first_samples(source, batches * batch) if isinstance(source, Samples) else FirstOf(source, batches)


def first_samples(source: Samples, most: int) -> Samples:
    """Return the first `most` samples, or all if there are fewer. Each data set of a mixture contributes its share."""
    total, done = sum(weight for _, weight in source.mixed), 0.0
    rest, counts = iter(source.counts), list[int]()
    for shards, weight in source.mixed or [(len(source.counts), 1.0)]:
        share = max(1, round(most * (done + weight) / (total or 1.0)) - round(most * done / (total or 1.0)))
        done += weight
        own = list(itertools.islice(rest, shards))
        before = itertools.accumulate(own, initial=0)
        counts += [min(count, max(0, share - start)) for count, start in zip(own, before, strict=False)]
    while counts and not source.mixed and not counts[-1]:
        counts.pop()
    fingerprint = hashlib.sha256(f"{source.fingerprint} first {most}".encode()).hexdigest()
    return Samples(source.reader, counts, fingerprint, source.transform, source.seed, source.mixed)
