"""From an order to steps: the workers' batches, and micro-batches."""

import itertools
import sys
import weakref
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate

from trainer.data.bad_samples import Bad, stand_in
from trainer.data.batch import Micro, Step, weight_of
from trainer.data.device_prefetch import upload
from trainer.data.iterable import refuse_other_size, replay, undisturbing
from trainer.data.remote.prefetch import Needs, fetching, of_training, of_validation
from trainer.data.sampling.mixture import Mixture
from trainer.data.sampling.order import Order, Ref, near_equal, walk
from trainer.data.source import Samples
from trainer.data.workers import start_workers
from trainer.errors import EXIT_CODES, UnavailableError
from trainer.log import log
from trainer.rng import mix

if TYPE_CHECKING:
    from trainer.plan import Plan


class Loader:
    """Batches of one rank of `beside` on its node, as `plan` splits them; the recipe's `weight` and `collate` are used
    where it has them."""

    def __init__(self, recipe: Any, plan: "Plan", rank: int, world: int, device: torch.device, beside: int = 1) -> None:
        self.recipe, self.plan, self.rank, self.world, self.device = recipe, plan, rank, world, device
        self.beside = beside
        self._running: weakref.WeakSet[Generator[Micro]] = weakref.WeakSet()  # weak: dropping one ends it as well

    def train(self, start: int) -> Iterator[Step]:
        """Steps for ever, from position `start` of the stream of samples on."""
        plan, source = self.plan, self.plan.source
        if isinstance(source, Samples):
            assert plan.order is not None
            starts = range(start, sys.maxsize if plan.max_steps is None else plan.max_steps * plan.batch, plan.batch)
            needs = partial(of_training, plan.order, starts, plan.accumulate, self.rank, self.world)
            lanes = -(-plan.data.lanes // self.world)
            micros = self._run(stand_in(self._load(source, self._ordered(plan.order, start), needs, lanes)))
        else:
            if self.world > 1:
                log.info("data is an iterable: each of %d ranks walks its own; see trainer/recipe.py", self.world)
            micros = self._run(self._replay(source, endless=True))
            first = next(micros)
            if not hasattr(self.recipe, "weight"):  # which may count otherwise
                refuse_other_size(first.batch, plan, self.world)
            micros = itertools.chain([first], micros)
            micros = itertools.islice(micros, start // plan.batch * plan.accumulate, None)
        micros = upload(micros, self.device)
        while group := list(itertools.islice(micros, plan.accumulate)):
            refs, bad = [ref for m in group for ref in m.refs], [each for m in group for each in m.bad]
            yield Step([m.batch for m in group], [m.weight for m in group], refs, bad)

    def validate(self) -> Iterator[Micro]:
        """Every sample once, over all ranks, as stored; the last micro-batch may be smaller, or a rank have none."""
        source = self.plan.validation
        assert source is not None
        if isinstance(source, Samples):
            parts = partial(self._stored, source)
            micros = self._load(source, parts(), partial(of_validation, parts), 1)
        else:
            micros = self._replay(source, endless=False)
        return upload(self._run(undisturbing(micros)), self.device)

    def close(self) -> None:
        """Ends what `train` and `validate` gave, and the workers; closes the files that this process has read."""
        for micros in list(self._running):
            micros.close()
        for source in (self.plan.source, self.plan.validation):
            if isinstance(source, Samples):
                source.reader.close()

    def _run(self, micros: Generator[Micro]) -> Iterator[Micro]:
        self._running.add(micros)
        return micros

    def _ordered(self, order: Order | Mixture, start: int) -> Iterator[list[Ref]]:
        parts = self.plan.accumulate
        for first in itertools.count(start, self.plan.batch):
            local = order.local(first, first + self.plan.batch, self.rank, self.world)
            for part in range(parts):
                yield local[slice(*near_equal(len(local), part, parts))]

    def _stored(self, source: Samples) -> Iterator[list[Ref]]:
        refs = walk(source.counts, self.rank, self.world)
        return iter(lambda: list(itertools.islice(refs, self.plan.micro)), [])

    def _replay(self, source: Iterable[Any], endless: bool) -> Generator[Micro]:
        return replay(source, weight_of(self.recipe), mix(self.plan.options.seed, 4, self.rank), endless)

    def _load(self, source: Samples, micro_refs: Iterator[list[Ref]], needs: Needs, lanes: int) -> Generator[Micro]:
        """The micro-batches of `micro_refs` through the workers, in this order; `needs` gives the shards of each."""
        to_load, to_name, later = itertools.tee(micro_refs, 3)
        workers, timeout_s = self.plan.data.workers, self.plan.options.timeout_s
        coming = itertools.islice(later, max(1, workers), None)  # the batches that the same workers read after these
        to_load = itertools.zip_longest(to_load, coming, fillvalue=[])
        loader = partial(
            DataLoader,
            Fetch(source, self.recipe),  # pyright: ignore[reportArgumentType] by __getitem__ it is map-style
            batch_size=None,  # what the sampler gives is a batch
            collate_fn=as_it_is,
            num_workers=workers,
            prefetch_factor=self.plan.data.prefetch if workers else None,
            timeout=timeout_s if workers else 0,
            pin_memory=self.device.type == "cuda",
        )
        batches = start_workers(loader, to_load) if workers else loader(sampler=to_load)
        try:
            with fetching(source.reader.remote(), needs, lanes, self.beside) as passed:
                for fetched, refs in zip(batches, to_name, strict=False):
                    if isinstance(fetched, Exception):
                        raise fetched
                    passed()
                    batch, weight, bad = fetched
                    yield Micro(batch, weight, refs, bad)
        except RuntimeError as error:
            if "DataLoader timed out" not in str(error):
                raise
            raise UnavailableError(
                f"trainer.timeout_s={timeout_s:g}: a data worker gave no batch in this time; a file or the recipe's "
                "data or transform hangs: mend it, or give it longer"
            ) from None


class Fetch:
    """In a worker: a batch and its weight, while it is on the CPU, and the samples that could not be read; no batch
    where that is all of them. An error of the data is returned: raised, it would have the worker's traceback in its
    message.
    """

    def __init__(self, source: Samples, recipe: Any) -> None:
        self.source, self.collate, self.weight = source, getattr(recipe, "collate", default_collate), weight_of(recipe)

    def __getitem__(self, now_and_next: tuple[list[Ref], list[Ref]]) -> tuple[Any, int, list[Bad]] | Exception:
        refs, coming = now_and_next
        try:
            self.source.reader.prefetch(coming)  # which the disk reads while these are decoded and passed on
            good, bad = self.source.batch(refs)
            batch = self.collate(good) if good else None
            return batch, self.weight(batch) if good else 0, bad
        except tuple(EXIT_CODES) as error:  # of no class that only the recipe knows
            return next(kind for kind in EXIT_CODES if isinstance(error, kind))(str(error))


def as_it_is(value: Any) -> Any:
    return value
