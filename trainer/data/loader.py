"""Loads a rank's batches in order, from data workers: steps for training, micro-batches for validation."""

import itertools
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from trainer.config.options import DataOptions
from trainer.data.bad_samples import Bad, replace_bad
from trainer.data.batch import Micro, Split, Step, count_samples, steps_from
from trainer.data.copies import Copies
from trainer.data.device_prefetch import Upload, upload
from trainer.data.iterable import Iterated, preserve_rng_state, refuse_other_size, replay
from trainer.data.remote.prefetch import Needs, fetching, training_needs, validation_needs
from trainer.data.sampling.mixture import Mixture
from trainer.data.sampling.order import Order, Refs, near_equal, walk
from trainer.data.slots import Slot, Slots, identity
from trainer.data.source import Collate, NamedSources, SampleFault, Samples, Source, by_prefix
from trainer.data.stream import Stream
from trainer.data.torch_loader import copy_loader, end_passes, end_workers, is_drawn, part_of
from trainer.data.workers import lost_batches, start_workers
from trainer.errors import EXIT_CODES, ConfigError, UnavailableError
from trainer.log import Terminal, doing, log
from trainer.rng import ITERABLE, mix

CPU = torch.device("cpu")
PLANNED = 2048  # samples whose order is computed at once
HELD = 3  # micro-batches in addition to those of a step: the next one, one that is copied, one that is waited for
NONE = Refs(np.empty((0, 3), np.int64))
AHEAD = 1.5  # steps that the workers load ahead, so that they keep working while a step is computed


class Loader:
    """Batches of one rank: steps for training, micro-batches for validation.

    Args:
        order: The order of the samples; None for an iterable.
        split: The split of a step, unless `train` gets another. Validation uses its largest micro-batch.
        timeout_s: Limit of the wait for a data worker.
        ranks_on_node: Ranks that share the folder of downloaded shards.
        weight: Counts the items that the loss of a batch averages over; None counts samples.

    Attributes:
        takes_own: For validation, a data set's `validation_batch` takes precedence over the split.
    """

    def __init__(
        self,
        source: Source,
        order: Order | Mixture | None,
        split: Split,
        options: DataOptions,
        *,
        validation: Source | NamedSources | None = None,
        rank: int = 0,
        seed: int = 0,
        timeout_s: float = 600.0,
        device: torch.device = CPU,
        ranks_on_node: int = 1,
        collate: Callable[[list[Any]], Any] = default_collate,
        weight: Callable[[Any], int] | None = None,
    ) -> None:
        self.source, self.order, self.split, self.options, self.validation = source, order, split, options, validation
        self.rank, self.seed, self.timeout_s, self.device = rank, seed, timeout_s, device
        self.ranks_on_node, self.collate, self.weight, self.takes_own = ranks_on_node, collate, weight, True
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.log_once = cache(log.info)  # otherwise each pass over the data would log the same
        self._parts: dict[tuple[int, bool], Iterable[Any]] = {}  # this rank's, by iterable and whether it trains
        self._running: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()  # weak, so that a dropped generator ends

    def train(
        self, start: int, split_at: Callable[[int], Split] | None = None, stop: float = math.inf
    ) -> Iterator[Step]:
        """Yield steps endlessly, starting at sample `start` of the stream.

        Args:
            split_at: Returns the split of the step at a position. It must be pure, because a resume calls it again.
            stop: Position from which no more shards are downloaded ahead.
        """
        steps = partial(steps_from, split_at=split_at or (lambda _: self.split))
        if isinstance(self.source, Samples):
            micros = self._ordered(self.source, partial(steps, start), stop, 1 if split_at else PLANNED)
        else:
            micros = self._iterated(self.source, steps, start)
        if stream := self.stream:
            micros = map(partial(to_upload, stream=stream), micros)
        ahead: list[Micro] = []  # with a stream, the next step's first micro-batch, which is uploaded during this step
        constant = itertools.repeat(self.split.micros(self.rank))
        for count in (split.micros(self.rank) for _, split in steps(start)) if split_at else constant:
            current = [*ahead, *itertools.islice(micros, count - len(ahead))]
            if stream:
                ahead = list(itertools.islice(micros, 1))
            if not current:
                return
            step = Step(current, ahead)
            del current
            yield step
            del step

    def copies(self) -> Copies:
        """Record the attributes of the training data set, if it is map-style."""
        reader = self.source.reader if isinstance(self.source, Samples) else None
        return Copies(getattr(reader, "dataset", None))

    def validations(self) -> dict[str, Callable[[], Iterator[Micro]]]:
        """Return `validate` of each validation data set, by the prefix of its metrics."""
        sources = by_prefix(self.validation, "val") if self.validation is not None else {}
        return {prefix: partial(self.validate, source) for prefix, source in sources.items()}

    def validate(self, source: Source | None = None) -> Iterator[Micro]:
        """Yield every sample of `source`, by default `validation`, once over all ranks, in the stored order.

        The last micro-batch may be smaller, and a rank may have none.
        """
        data = self.validation if source is None else source
        assert data is not None and not isinstance(data, NamedSources)
        if isinstance(data, Samples):
            first, last = near_equal(sum(data.counts), self.rank, self.split.world)
            batches = -(-(last - first) // self._size(data))
            parts = partial(self._stored, data)
            micros = self._load(data, parts(), partial(validation_needs, parts), 1, self.options.prefetch)
        else:
            batches = data.batches_in(self.split.world) or 0
            micros = self._replay(data, endless=False)
        return with_progress(upload(self._run(preserve_rng_state(micros)), self.stream), batches)

    def first_batches(self, samples: int, purpose: str) -> Generator[Micro]:
        """Yield this rank's micro-batches of the first training steps, up to `samples` samples.

        The terminal shows their `purpose`. The position of `train` does not change. Bad samples are left out, not
        replaced. The data must be samples by reference.
        """
        order, source = self.order, self.source
        assert order is not None and isinstance(source, Samples)
        steps = [(start, self.split) for start in range(0, samples, self.split.samples)]
        needs = partial(training_needs, order, steps, self.rank)
        ends = self._step_ends(iter(steps))
        micros = self._load(source, self._refs(order, iter(steps), PLANNED), needs, 1, self.options.prefetch, ends)
        batches = len(steps) * self.split.micros(self.rank)
        return with_progress(upload(self._run(preserve_rng_state(micros)), self.stream), batches, purpose)

    def close(self) -> None:
        """End the iterators of `train` and `validate` and their workers, and close this process's shards."""
        for micros in list(self._running):
            micros.close()
        for source in filter(None, (self.source, self.validation)):
            source.close()
        for part in self._parts.values():
            end_workers(part)
            end_passes(part)

    def _run(self, micros: Generator[Micro]) -> Iterator[Micro]:
        self._running.add(micros)
        return micros

    def _ordered(
        self, source: Samples, steps: Callable[[], Iterator[tuple[int, Split]]], stop: float, planned: int
    ) -> Iterator[Micro]:
        order = self.order
        assert order is not None

        def needs() -> Iterator[set[int]]:
            return training_needs(order, itertools.takewhile(lambda step: step[0] < stop, steps()), self.rank)

        lanes = -(-self.options.shuffle_shards // self.split.world)
        accumulate = max(self.split.micros(self.rank), next(steps())[1].micros(self.rank))
        ahead = max(self.options.prefetch, math.ceil(AHEAD * accumulate / max(1, self.options.workers)))
        micros = self._load(source, self._refs(order, steps(), planned), needs, lanes, ahead, self._step_ends(steps()))
        return self._run(replace_bad(micros))

    def _refs(self, order: Order | Mixture, steps: Iterator[tuple[int, Split]], planned: int) -> Iterator[Refs]:
        """Yield the samples of each micro-batch. The order of equal steps up to `planned` samples is computed at once.

        A callback that splits steps decides for those that are not planned yet, so these are planned one by one.
        """
        for split, group in itertools.groupby(steps, itemgetter(1)):
            most = max(1, min(planned, order.samples) // split.samples)
            accumulate, share = split.micros(self.rank), split.share(self.rank)
            bounds = [near_equal(share, part, accumulate) for part in range(accumulate)]
            while some := list(itertools.islice(group, most)):
                start, stop = some[0][0], some[-1][0] + split.samples
                local = order.local(start, stop, self.rank, split.shares, len(some))
                for first in range(0, len(local), share):
                    yield from (local[first + low : first + high] for low, high in bounds)

    def _step_ends(self, steps: Iterator[tuple[int, Split]]) -> Iterator[bool]:
        """Yield for each micro-batch whether it is the last of its step."""
        for _, split in steps:
            yield from itertools.repeat(False, split.micros(self.rank) - 1)
            yield True

    def _iterated(
        self, source: Iterated, steps: Callable[[int], Iterator[tuple[int, Split]]], start: int
    ) -> Iterator[Micro]:
        shared = isinstance(source.given, DataLoader) and is_drawn(source.given)  # which says so itself
        if self.split.world > 1 and not (shared or isinstance(source.given, Stream)):
            log.info("recipe.data('train') is an iterable: each of %d ranks has batches of its own", self.split.world)
        if isinstance(source.given, DataLoader):
            log.info(
                "recipe.data('train') is a DataLoader: its own order and its num_workers=%d, not those of data.*",
                source.given.num_workers,
            )
        micros = self._run(self._replay(source, endless=True))
        first = next(micros)
        if self.weight is None:  # a weight may count otherwise
            refuse_other_size(source, first.batch, self.split)
        passed = itertools.takewhile(lambda step: step[0] < start, steps(0))
        return itertools.islice(
            itertools.chain(iter([first]), micros), sum(split.micros(self.rank) for _, split in passed), None
        )

    def _stored(self, source: Samples) -> Iterator[Refs]:
        return walk(source.counts, self.rank, self.split.world, self._size(source))

    def _size(self, source: Samples) -> int:
        """Return the size of a validation micro-batch."""
        own = getattr(getattr(source.reader, "dataset", None), "validation_batch", None)
        return own if own and self.takes_own else self.split.micro

    def _replay(self, source: Iterated, endless: bool) -> Generator[Micro]:
        part = self._own(source.given, endless)
        return replay(part, self.weight, mix(self.seed, ITERABLE, self.rank), endless, source)

    def _own(self, source: Any, endless: bool) -> Iterable[Any]:
        """Return this rank's batches of an iterable."""
        if isinstance(source, Stream):
            return source.batches(self.split.micro, self.rank, self.split.world, self.collate, endless)
        if (key := (id(source), endless)) not in self._parts:
            world = self.split.world
            part: Any = part_of(source, self.rank, world, mix(self.seed, ITERABLE, world), self.log_once)
            trained = isinstance(self.source, Iterated) and part is self.source.given
            shared = not endless and trained and isinstance(part, DataLoader)
            self._parts[key] = copy_loader(part) if shared else part
        return self._parts[key]

    def _load(
        self, source: Samples, micro_refs: Iterator[Refs], needs: Needs, lanes: int, ahead: int,
        ends: Iterator[bool] | None = None,
    ) -> Generator[Micro]:  # fmt: skip
        """Yield the micro-batches of `micro_refs` from workers, in order.

        Args:
            needs: Yields the shards of the micro-batches up to each end.
            ahead: Micro-batches that each worker loads ahead.
            ends: Yields for each micro-batch whether it is such an end; None: all are.
        """
        to_load, to_name, later = itertools.tee(micro_refs, 3)
        workers, timeout_s = self.options.workers, self.timeout_s
        following = itertools.islice(later, max(1, workers), None)  # the next micro-batch of the same worker
        to_load = itertools.zip_longest(to_load, following, fillvalue=NONE)
        fetch: Any = Fetch(source, self.collate, self.weight or count_samples, self._slots(ahead) if workers else None)
        loader = partial(
            DataLoader,
            fetch,
            batch_size=None,  # an item of the sampler is a batch
            collate_fn=identity,
            num_workers=workers,
            prefetch_factor=ahead,
            timeout=timeout_s,
        )
        batches: Any = None
        try:
            batches = start_workers(loader, to_load, fetch.begin_worker) if workers else map(fetch, to_load)
            with fetching(source.reader.remote(), needs, lanes, self.ranks_on_node) as count_done:
                for fetched, refs, end in zip(batches, to_name, ends or itertools.repeat(True), strict=False):
                    if isinstance(fetched, Exception):
                        raise fetched
                    if end:
                        count_done()
                    batch, weight, bad = fetched
                    micro = Micro(fetch.taken(batch), weight, refs, bad)
                    del fetched, batch  # so that only the consumer keeps the batch
                    yield micro
                    del micro
        except (FileNotFoundError, RuntimeError) as error:
            if reason := lost_batches(error, batches, timeout_s):
                raise UnavailableError(reason) from None
            raise
        finally:
            fetch.close()

    def _slots(self, ahead: int) -> Slots:
        workers, held = self.options.workers, self.split.micros(self.rank) + HELD
        return Slots(workers, ahead - (-held // workers), self.device.type == "cuda")


class Fetch:
    """The dataset of a DataLoader: in a worker, loads a batch, its weight and its bad samples.

    If all samples are bad, the batch is None. Errors are returned, because torch would add the worker's traceback to
    the message of a raised one.

    Args:
        slots: A worker sends the batch in one of these; None: there are no workers.
    """

    def __init__(
        self, source: Samples, collate: Collate, weight: Callable[[Any], int], slots: Slots | None = None
    ) -> None:
        self.source, self.collate, self.weight, self.slots = source, collate, weight, slots

    def begin_worker(self, worker: int) -> None:
        assert self.slots is not None
        self.slots.begin_worker(worker)
        self.source.reader.begin_worker(worker)

    def __call__(self, now_and_next: tuple[Refs, Refs]) -> tuple[Any, int, list[Bad]] | Exception:
        slot = self.slots and self.slots.free()
        try:
            batch, bad = self._batch(*now_and_next, slot)
            if batch is None:
                return None, 0, bad
            weight = self.weight(batch)
            return self.slots.pack(batch, slot) if self.slots else batch, weight, bad
        except SampleFault as error:
            return error
        except tuple(EXIT_CODES) as error:  # a subclass of the recipe's might not unpickle in the rank
            return next(kind for kind in EXIT_CODES if isinstance(error, kind))(str(error))

    def taken(self, batch: Any) -> Any:
        """Return on the rank a batch that a worker has sent."""
        return self.slots.take(batch) if self.slots and batch is not None else batch

    def close(self) -> None:
        """Close the rank's slots."""
        if self.slots:
            self.slots.close()

    def _batch(self, refs: Refs, following: Refs, slot: Slot | None) -> tuple[Any, list[Bad]]:
        """Return the batch of the good samples, and the bad ones; the batch is None if there is no good one."""
        if (batch := self.source.whole(refs, self.collate, slot.empty if slot else torch.empty)) is not None:
            return batch, []
        self.source.reader.prefetch(following)  # the disk reads the next samples while these are decoded
        good, bad = self.source.batch(refs)
        if not good:
            return None, bad
        left_out = {sample.ref for sample in bad}
        kept = [ref for ref in refs if ref not in left_out] if bad else refs
        into = slot.collate if slot and self.collate is default_collate else self.collate
        if (batch := self.source.collate(kept, good, self.collate, into)) is None:
            raise ConfigError("recipe.collate(): returned None; return the batch")
        return batch, bad

    __getitem__ = __call__  # torch's DataLoader takes it for a map-style data set


def with_progress(micros: Iterator[Micro], batches: int, purpose: str = "validating") -> Generator[Micro]:
    """Show the number of the current batch on the terminal, out of `batches` unless that is 0."""
    with doing(purpose):
        for number, micro in enumerate(micros, start=1):
            Terminal.doing = f"{purpose} {number}/{batches}" if batches else f"{purpose} {number}"
            yield micro
            del micro


def to_upload(micro: Micro, stream: torch.cuda.Stream) -> Micro:
    return micro._replace(batch=Upload(micro.batch, stream))
