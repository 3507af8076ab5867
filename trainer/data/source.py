"""Reads and collates opened data: samples by reference, or several data sets by name."""

import copy
import hashlib
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate, get_worker_info

from trainer.data.bad_samples import Bad
from trainer.data.draws import same, states, untouched, watch
from trainer.data.iterable import Iterated
from trainer.data.own_generators import generators_in, seed_each
from trainer.data.remote.shard import Remote
from trainer.data.rows import Empty, Rows, many_of
from trainer.data.sampling.mixture import Mixture
from trainer.data.sampling.order import Order, Ref, Refs, groups
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.transforms import Dropped, maker_of
from trainer.data.slots import identity
from trainer.errors import (
    EXIT_CODES,
    NO_SHARED_MEMORY,
    ConfigError,
    DataError,
    NumericsError,
    UnavailableError,
    lacks_shared_memory,
    printable,
)
from trainer.log import log
from trainer.rng import SAMPLE, keyed, mix, mix_each, seed_all

Transform = Callable[[Any, Generator], Any]
Collate = Callable[[list[Any]], Any]


class SampleFault(RuntimeError):
    """An error in the recipe's or the dataset's code. The sample itself is not bad."""


class Samples:
    """Stateless access to samples by reference. Each data worker has a copy.

    If samples draw random numbers, `random`, NumPy, torch and a map-style data set's own generators are seeded from
    (seed, epoch, sample) before each of them. Augmentations therefore depend neither on the number of workers nor on
    the number of ranks.

    Args:
        mixed: For a mixture, the number of shards and the weight of each data set.
    """

    batch_size: int | None = None  # samples have no batches yet

    def __init__(
        self,
        reader: "ShardReader | MapReader",
        counts: list[int],
        fingerprint: str,
        transform: Transform | None,
        seed: int,
        mixed: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.reader, self.counts, self.fingerprint = reader, counts, fingerprint
        self.transform, self.seed, self.mixed = transform, seed, mixed
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.bases: list[int] = self.starts.tolist()
        self.generators: list[Any] | None = None  # the data set's own; None: not searched yet in this process
        self.draws: bool | None = None  # whether samples draw random numbers; None: no good one was read yet

    @property
    def size(self) -> int:
        return sum(self.counts)

    def order(self, lanes: int, block: int) -> Order | Mixture:
        if not self.mixed:
            return Order(self.counts, self.seed, lanes, block)
        rest = iter(self.counts)
        counts = [list(itertools.islice(rest, shards)) for shards, _ in self.mixed]
        return Mixture(counts, [weight for _, weight in self.mixed], self.seed, lanes, block)

    def first(self, batches: int, batch: int, micros: int, key: str) -> "Samples":
        """Return the first samples in the stored order. Each data set of a mixture contributes its share."""
        samples = batches * batch
        total, done = sum(weight for _, weight in self.mixed) or 1.0, 0.0
        rest, counts = iter(self.counts), list[int]()
        for shards, weight in self.mixed or [(len(self.counts), 1.0)]:
            share = max(1, round(samples * (done + weight) / total) - round(samples * done / total))
            done += weight
            own = list(itertools.islice(rest, shards))
            starts = itertools.accumulate(own, initial=0)
            counts += [min(count, max(0, share - start)) for count, start in zip(own, starts, strict=False)]
        while counts and not self.mixed and not counts[-1]:
            counts.pop()
        fingerprint = hashlib.sha256(f"{self.fingerprint} first {samples}".encode()).hexdigest()
        return Samples(self.reader, counts, fingerprint, self.transform, self.seed, self.mixed)

    def close(self) -> None:
        self.reader.close()

    def numbers(self, refs: Refs) -> NDArray[np.int64]:
        """Return the places of samples in the stored order."""
        return self.starts[refs.rows[:, 1]] + refs.rows[:, 2]

    def _keys(self, refs: Refs) -> list[int]:
        """Return the key of each sample's random numbers."""
        numbers, keys = self.numbers(refs).astype(np.uint64), np.empty(len(refs), np.uint64)
        for epoch, here in groups(refs.rows[:, 0]):
            keys[here] = mix_each(self.seed, SAMPLE, epoch, last=numbers[here])
        return keys.tolist()

    def whole(self, refs: Refs, collate: Collate, empty: Empty) -> Any:
        """Return the batch of a data set that is rows of tensors, each from `empty`; None for any other data set."""
        if self.transform is not None or collate is not default_collate or self.reader.rows is None:
            return None
        if (batch := self.reader.rows.take(self.numbers(refs).tolist(), empty)) is not None:
            self._seed(refs[-1])
        return batch

    def batch(self, refs: Refs) -> tuple[list[Any], list[Bad]]:
        """Read samples, and return the good ones and the damaged ones.

        Seeding takes longer than reading a small sample. So samples are seeded one by one in the first batch of a
        process, and if they draw. If a later batch is the first one that draws, it is read again. The generators are
        left as seeding each sample leaves them, because `collate` and code of the step may draw from them.
        """
        if self.generators is None:
            self.generators = generators_in(getattr(self.reader, "dataset", None))
            self.draws = True if self.generators else None
        if self.draws is None:
            return self._first(refs)
        found = None if self.draws else self._unseeded(refs)
        return found or self._read(refs, seeded=True)

    def _first(self, refs: Refs) -> tuple[list[Any], list[Bad]]:
        """Read samples with a seed each, and notice whether they draw.

        Code that asks for a seed, or that restores a generator, leaves no trace, so one sample gets a second seed, too.
        """
        good, bad, drew = list[Any](), list[Bad](), False
        for number in range(len(refs)):
            one = refs[number : number + 1]
            self._seed(one[0])
            before = states()
            some, damaged = self._read(one, seeded=True)
            drew = drew or states() != before
            if some and not good and not drew:
                some[0], drew = self._again(one, some[0])
                self._seed(one[0])
            good += some
            bad += damaged
        if good:
            self.draws = drew
        return good, bad

    def _again(self, one: Refs, sample: Any) -> tuple[Any, bool]:
        """Return a sample, copied before its code runs again, and whether it differs with another seed."""
        try:
            kept = copy.deepcopy(sample)
            read, [place], _ = self.reader.reads(one, at_once=False)
            watch()
            return kept, not same(kept, self._make(read, False, place, self._keys(one)[0]))
        except Exception:  # it can't be read or copied twice
            return sample, True

    def _unseeded(self, refs: Refs) -> tuple[list[Any], list[Bad]] | None:
        """Read samples; None if they draw random numbers."""
        fault, found = None, None
        watch()
        try:
            found = self._read(refs, seeded=False)
        except Exception as error:
            fault = error
        self.draws = not untouched()
        if self.draws:
            return None
        if fault:
            raise fault
        self._seed(refs[-1])
        return found

    def _seed(self, ref: Ref) -> None:
        seed_all(mix(self.seed, SAMPLE, ref.epoch, self.bases[ref.shard] + ref.offset))

    def _read(self, refs: Refs, seeded: bool) -> tuple[list[Any], list[Bad]]:
        good, bad = list[Any](), list[Bad]()
        read, places, fault = self.reader.reads(refs, at_once=not seeded)
        if seeded or self.transform:
            samples = map(partial(self._make, read, seeded), places, self._keys(refs))
        else:
            samples = map(read, places)
        while len(good) + len(bad) < len(refs):
            try:
                good.extend(samples)  # up to a sample that can't be read
                if len(good) + len(bad) < len(refs):  # its code has raised StopIteration, which ends the list
                    raise RuntimeError("StopIteration, as of next() without a default")
            except Dropped:
                raise
            except DataError as error:
                ref = refs[len(good) + len(bad)]
                bad.append(Bad(ref, str(error), *self.reader.name(ref)))
            except (*EXIT_CODES, MemoryError):
                raise
            except Exception as error:
                raise SampleFault(self._trace(refs[len(good) + len(bad)], error)) from None
        if fault and not bad:
            self.reader.leave_many(fault)
        return good, bad

    def _make(self, read: Callable[[Any], Any], seeded: bool, place: Any, key: int) -> Any:
        if seeded:
            seed_all(key)
            if self.generators:
                seed_each(self.generators, key)
        value = read(place)
        return value if self.transform is None else self.transform(value, keyed(key))

    def collate(self, refs: Sequence[Ref], samples: list[Any], collate: Collate, collate_into: Collate) -> Any:
        """Return the batch of these samples by `collate_into`; `collate` makes the same elsewhere.

        Raises:
            ConfigError: torch's `default_collate` fails. The message names the sample that does not fit.
            UnavailableError: /dev/shm has no room for the batch.
            SampleFault: A `collate` of the recipe fails. The message names the sample and has the frames.
        """
        try:
            return collate_into(samples)
        except (*EXIT_CODES, MemoryError):
            raise
        except Exception as error:
            if lacks_shared_memory(error):  # the sample is not bad
                raise UnavailableError(NO_SHARED_MEMORY) from None
            for ref, sample in zip(refs, samples, strict=True):
                for some in ([sample], [samples[0], sample]):
                    try:
                        collate(some)
                    except Exception as cause:
                        raise self._misfit(ref, sample, cause, collate) from None
            raise SampleFault(self._trace(refs[0], error, "the batch from this sample on can't be made: ")) from None

    def _misfit(self, ref: Ref, sample: Any, error: Exception, collate: Any) -> Exception:
        """Return the error for a sample that `collate` rejects, alone or with the first one of its batch."""
        if collate is not default_collate:
            return SampleFault(self._trace(ref, error, "does not fit into a batch: "))
        if sample is None:
            return ConfigError(f"{self.where(ref)}: is None; return the sample from {maker_of(self.transform)}")
        fix = "give samples of one shape and of tensors, arrays or numbers, or give `collate`"
        return ConfigError(f"{self.where(ref)}: does not fit into a batch ({error}); {fix}")

    def _trace(self, ref: Ref, error: Exception, problem: str = "") -> str:
        """Return a message with the sample and the frames, because a worker does not send its traceback."""
        frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        return f"{self.where(ref)}: {problem}{type(error).__name__}: {error}\n{frames}"

    def where(self, ref: Ref) -> str:
        """Return the sample's index, or its shard and key."""
        shard, key = self.reader.name(ref)
        return printable(f"sample {key}" if isinstance(shard, int) else f"{shard}: sample {ref.offset} ({key!r})")


class MapReader:
    """A map-style dataset in virtual shards of `per_shard` samples, with the interface of `ShardReader`."""

    def __init__(self, dataset: Any, per_shard: int) -> None:
        self.dataset, self.per_shard = dataset, per_shard
        self.many, self.rows = many_of(dataset), Rows.of(dataset)
        self.one = partial(getitem, dataset)
        if self.many and type(dataset).__getitem__ is Dataset.__getitem__:  # which only raises
            self.one = lambda item: many_of(dataset)([item])[0]  # pyright: ignore[reportOptionalCall] it has one

    def reads(self, refs: Refs, at_once: bool) -> tuple[Callable[[Any], Any], Sequence[Any], Exception | None]:
        """Return a function, its argument for each sample, and why the samples could not be read at once."""
        items, fault = (refs.rows[:, 1] * self.per_shard + refs.rows[:, 2]).tolist(), None
        if at_once and self.many:
            try:
                values = self.many(items)
                if isinstance(values, Mapping):
                    raise TypeError("returned a dict; return a list of samples")
                if len(values := list(values)) == len(items):
                    return identity, values, None
                raise ValueError(f"returned {len(values)} samples for {len(items)} indices")
            except (ConfigError, NumericsError, UnavailableError, MemoryError):
                raise
            except Exception as error:  # one of these samples may be bad: each is read by itself
                fault = error
        return self.one, items, fault

    def leave_many(self, fault: Exception) -> None:
        """Use `__getitems__` no more, because it fails where each sample can be read."""
        reason = f"{type(self.dataset).__name__}.__getitems__ fails where each sample can be read"
        log.warning("recipe.data: %s (%s: %s); it is not used any more", reason, type(fault).__name__, fault)
        self.many = None

    def name(self, ref: Ref) -> tuple[int, str]:
        return ref.shard, str(ref.shard * self.per_shard + ref.offset)

    def begin_worker(self, worker: int) -> None:
        """Call the data set's `worker_init_fn`, if it has one, as its DataLoader would."""
        own = getattr(self.dataset, "worker_dataset", self.dataset)
        object.__setattr__(get_worker_info(), "dataset", own)  # torch forbids a plain assignment
        if init := getattr(self.dataset, "worker_init_fn", None):
            init(worker)

    def prefetch(self, refs: Refs) -> None:
        """Do nothing: a dataset has no prefetch."""

    def remote(self) -> dict[int, Remote]:
        return {}

    def close(self) -> None:
        """Do nothing: the dataset belongs to the recipe."""


Source = Samples | Iterated


class NamedSources(dict[str, Source]):
    """Several data sets for validation, by name."""

    @property
    def fingerprint(self) -> str:
        names = [(name, part.fingerprint) for name, part in self.items()]
        return hashlib.sha256(repr(names).encode()).hexdigest()

    @property
    def size(self) -> int:
        """The number of samples; 0 if that of any data set is unknown."""
        sizes = [part.size for part in self.values()]
        return sum(sizes) if all(sizes) else 0

    def first(self, batches: int, batch: int, micros: int, key: str) -> "NamedSources":
        return NamedSources({name: part.first(batches, batch, micros, key) for name, part in self.items()})

    def close(self) -> None:
        for part in self.values():
            part.close()


def by_prefix(source: Source | NamedSources, split: str) -> dict[str, Source]:
    """Return the data sets by the prefix of their metrics: `val`, or `val/NAME` if there are several."""
    if not isinstance(source, NamedSources):
        return {split: source}
    return {f"{split}/{name}": part for name, part in source.items()}
