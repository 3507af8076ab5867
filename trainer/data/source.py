"""Opens a recipe's `data` as one of two kinds: samples by reference, or an iterable of batches."""

import hashlib
import itertools
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from trainer.config.options import DataOptions
from trainer.data.bad_samples import Bad
from trainer.data.own_generators import generators_in, seed_each
from trainer.data.remote.shard import Remote
from trainer.data.sampling.mixture import Mixture
from trainer.data.sampling.order import Order, Ref
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.transforms import Dropped, Maps, maker_of
from trainer.data.stream import Stream, is_stream
from trainer.errors import (
    EXIT_CODES,
    NO_SHARED_MEMORY,
    ConfigError,
    DataError,
    UnavailableError,
    lacks_shared_memory,
    printable,
)
from trainer.log import log
from trainer.process.environment import Place
from trainer.rng import RECIPE_DATA, SAMPLE, keyed, mix, mix_each, seed_all

EPOCH = attrgetter("epoch")
Transform = Callable[[Any, Generator], Any]
NAME = re.compile(r"[\w.-]+")  # of one of several data sets
VIRTUAL_SHARDS = 65536  # the most shards of a map-style dataset, so many that shuffling moves single samples


class SampleFault(RuntimeError):
    """An error in the recipe's or dataset's code while making a sample or a batch. The sample itself is not bad."""


class Samples:
    """Stateless access to samples by reference. Each data worker has a copy.

    Before each sample, `random`, NumPy, torch and a map-style data set's own generators are seeded from (seed, epoch,
    sample). Augmentations therefore depend neither on the number of workers nor on the number of ranks.

    Args:
        mixed: For a mixture, the number of shards and the weight of each data set.
    """

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
        self.bases = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self.generators: list[Any] | None = None  # the data set's own; None: not searched yet in this process

    def order(self, lanes: int, block: int) -> Order | Mixture:
        """Return the order of the samples in training."""
        if not self.mixed:
            return Order(self.counts, self.seed, lanes, block)
        rest = iter(self.counts)
        counts = [list(itertools.islice(rest, shards)) for shards, _ in self.mixed]
        return Mixture(counts, [weight for _, weight in self.mixed], self.seed, lanes, block)

    def __getitem__(self, ref: Ref) -> Any:
        good, bad = self.batch([ref])
        if bad:
            raise DataError(bad[0].why)
        return good[0]

    def _keys(self, refs: Sequence[Ref]) -> list[int]:
        """Return the key of each sample's random numbers."""
        keys: list[int] = []
        for epoch, some in itertools.groupby(refs, EPOCH):
            numbers = [self.bases[shard] + offset for _, shard, offset in some]
            keys += mix_each(self.seed, SAMPLE, epoch, last=np.array(numbers, np.uint64)).tolist()
        return keys

    def batch(self, refs: list[Ref]) -> tuple[list[Any], list[Bad]]:
        """Read the samples; return the good ones and the damaged ones."""
        good: list[Any] = []
        bad: list[Bad] = []
        read, transform = self.reader.read, self.transform
        if self.generators is None:
            self.generators = generators_in(getattr(self.reader, "dataset", None))
        for ref, key in zip(refs, self._keys(refs), strict=True):
            try:
                seed_all(key)
                if self.generators:
                    seed_each(self.generators, key)
                value = read(ref)
                good.append(value if transform is None else transform(value, keyed(key)))
            except Dropped:
                raise
            except DataError as error:
                bad.append(Bad(ref, str(error), *self.reader.name(ref)))
            except (*EXIT_CODES, MemoryError):
                raise
            except Exception as error:
                raise SampleFault(self._blame(ref, error)) from None
        return good, bad

    def collate(self, refs: list[Ref], samples: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
        """Return the batch of these samples.

        Raises:
            DataError: The message names the sample that does not fit.
            UnavailableError: /dev/shm has no room for the batch.
            SampleFault: A `collate` of the recipe fails. The message names the sample and has the frames.
        """
        try:
            return collate(samples)
        except (*EXIT_CODES, MemoryError):
            raise
        except Exception as error:
            if lacks_shared_memory(error):  # the sample is not bad
                raise UnavailableError(NO_SHARED_MEMORY) from None
            for ref, sample in zip(refs, samples, strict=True):
                for some in ([sample], [samples[0], sample]):
                    try:
                        collate(some)
                    except Exception as same:
                        raise self._misfit(ref, sample, same, collate) from None
            raise SampleFault(self._blame(refs[0], error, "the batch from this sample on can't be made: ")) from None

    def _misfit(self, ref: Ref, sample: Any, error: Exception, collate: Any) -> Exception:
        """Return the error of a sample for which `collate` fails, alone or together with the first one of its batch."""
        if collate is not default_collate:
            return SampleFault(self._blame(ref, error, "does not fit into a batch: "))
        if sample is None:
            return DataError(f"{self.where(ref)}: is None; return the sample from {maker_of(self.transform)}")
        form = "give samples of one shape and of tensors, arrays or numbers, or give `collate`"
        return DataError(f"{self.where(ref)}: does not fit into a batch ({error}); {form}")

    def _blame(self, ref: Ref, error: Exception, what: str = "") -> str:
        """Return a message with the sample and the frames, because a worker does not send its traceback."""
        frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        return f"{self.where(ref)}: {what}{type(error).__name__}: {error}\n{frames}"

    def where(self, ref: Ref) -> str:
        """Return the sample's index, or its shard and key."""
        shard, key = self.reader.name(ref)
        return printable(f"sample {key}" if isinstance(shard, int) else f"{shard}: sample {ref.offset} ({key!r})")


class MapReader:
    """A map-style dataset, cut into shards of `per_shard` samples."""

    def __init__(self, dataset: Any, per_shard: int) -> None:
        self.dataset, self.per_shard = dataset, per_shard

    def read(self, ref: Ref) -> Any:
        return self.dataset[ref.shard * self.per_shard + ref.offset]

    def name(self, ref: Ref) -> tuple[int, str]:
        return ref.shard, str(ref.shard * self.per_shard + ref.offset)

    def begin_worker(self, worker: int) -> None:
        """Call the `worker_init_fn` of a data set that has one, as a DataLoader of it does."""
        own = getattr(self.dataset, "worker_dataset", self.dataset)
        object.__setattr__(get_worker_info(), "dataset", own)  # torch forbids a plain assignment
        if init := getattr(self.dataset, "worker_init_fn", None):
            init(worker)

    def prefetch(self, refs: Sequence[Ref]) -> None:
        """Do nothing: a dataset has no prefetch."""

    def remote(self) -> dict[int, Remote]:
        """Return no remote shards: a dataset has none."""
        return {}

    def close(self) -> None:
        """Do nothing: the dataset belongs to the recipe."""


def in_turns(place: Place, each: Callable[[Any], list[Any]], call: Callable[[], Any]) -> Any:
    """Call on rank 0 first, which prepares shared files, then on one rank of each other node, then on all others.

    A collective.

    Args:
        each: Returns the values of all ranks on every rank.
    """
    turn = 2 if place.local_rank else 1 if place.rank else 0
    for _ in range(turn):
        each(None)
    found = call()
    for _ in range(turn, 2):
        each(None)
    return found


def prepare_files(recipe: Any, seed: int, here: bool) -> None:
    """Call the recipe's `prepare_files`, if it has one."""
    if hasattr(recipe, "prepare_files"):
        seed_all(mix(seed, RECIPE_DATA))
        recipe.prepare_files(here)


def open_source(
    recipe: Any,
    split: str,
    seed: int,
    options: DataOptions | None = None,
    timeout_s: float = math.inf,
    validates: bool | None = None,
) -> "Samples | Stream | Iterable[Any] | Several | None":
    """Open the recipe's data of `split`; None if there is none (validation only).

    A mapping of names to data sets is opened as `Several`, but not for training.

    Args:
        validates: The samples are not for training, so `val_transform` applies; None: unless `split` is "train".

    Raises:
        DataError, ConfigError: Shards fail as in `find_shards` and `Index.open`.
        DataError: The data is empty, or can be used only once.
    """
    # Both splits get the same seed, so that a `random_split` in `data` is the same both times.
    seed_all(mix(seed, RECIPE_DATA))
    data, options = returned(recipe, split), options or DataOptions()
    transform = transform_of(recipe, options, split != "train" if validates is None else validates)
    if data is None:
        return None
    sets = isinstance(data, Mapping) and bool(data) and not any(isinstance(w, int | float) for w in data.values())
    if (
        sets
        and split == "train"
        and any(hasattr(part, "__getitem__") and not isinstance(part, str) for part in data.values())
    ):
        raise ConfigError("recipe.data('train'): returned a dict of data sets; return one of them, as data[split]")
    if split != "train" and isinstance(data, Mapping) and (sets or not data):
        return several(data, split, lambda part: open_data(transform, part, split, seed, options, timeout_s))
    return open_data(transform, data, split, seed, options, timeout_s)


def returned(recipe: Any, split: str) -> Any:
    """Return `recipe.data(split)`.

    Raises:
        ConfigError: It asks for the rank, which the process that plans the run does not have.
    """
    try:
        return recipe.data(split)
    except (ValueError, RuntimeError) as error:
        if "process group has not been initialized" not in str(error):
            raise
        raise ConfigError(
            f"recipe.data({split!r}): asks torch.distributed for the rank, as DistributedSampler(dataset) does, and "
            "the run is planned before there are ranks; return the DataLoader without it, whose samples the ranks share"
        ) from None


def transform_of(recipe: Any, options: DataOptions, validates: bool) -> Transform | None:
    """Return `data.map` followed by the recipe's `transform`, or by its `val_transform` if not for training."""
    own = getattr(recipe, "transform", None)
    own = getattr(recipe, "val_transform", own) if validates else own
    return Maps(options.map, own) if options.map else own


def open_data(
    transform: Transform | None, data: Any, split: str, seed: int, options: DataOptions, timeout_s: float
) -> Samples | Stream | Iterable[Any]:
    """Open one data set that the recipe has returned."""
    refuse_no_data(data, split)
    if _names_shards(data):
        index = Index.open(find_shards(data, options), Progress())
        reader = ShardReader(index, options.decoders, timeout_s)
        return Samples(reader, index.counts, index.fingerprint, transform, seed)
    if isinstance(data, Mapping):
        return mixture(data, split, transform, seed, options, timeout_s)
    if options.decoders and split == "train":
        raise ConfigError("data.decoders: recipe.data('train') has no shards to decode; leave data.decoders out")
    if is_map_style(data):
        if not options.workers and getattr(data, "worker_init_fn", None):
            raise ConfigError(
                f"data.workers=0: recipe.data({split!r}) has a worker_init_fn, which data workers call; give "
                "data.workers=1 or more"
            )
        return map_style(data, split, transform, seed)
    if is_stream(data):
        return Stream(data, transform, seed)
    if isinstance(data, DataLoader) and transform is not None and not options.map:
        raise ConfigError(
            f"recipe.transform: recipe.data({split!r}) is a DataLoader, whose samples it does not get; apply it in the "
            "data set, or return the Dataset instead"
        )
    if options.map:
        raise ConfigError(
            f"data.map: recipe.data({split!r}) gives batches, and data.map takes samples; leave data.map out, or "
            "return a Dataset"
        )
    if split != "train" and is_used_up(data):
        raise DataError(
            f"recipe.data({split!r}): a {type(data).__name__} is used up by the first validation; "
            "return a list of batches, or an object whose __iter__ starts over"
        )
    return data


def refuse_no_data(data: Any, split: str) -> None:
    """Raise an error if `data` can't be iterated, or is an empty list.

    Raises:
        ConfigError: The value has a wrong type.
        DataError: The list is empty, as `glob.glob` of a missing folder is.
    """
    key, form = f"recipe.data({split!r})", "return shards, a Dataset, or an iterable of batches"
    parts = list(data.values()) if isinstance(data, Mapping) and split == "train" else data
    if isinstance(parts, list | tuple) and any(isinstance(part, DataLoader | Dataset) for part in parts):
        kind = next(type(part).__name__ for part in parts if isinstance(part, DataLoader | Dataset))
        raise ConfigError(
            f"{key}: returned a {type(data).__name__} with a {kind}; return one, of a ConcatDataset of their samples"
            + ("" if split == "train" else ", or several as a dict of names")
        )
    if isinstance(data, type):
        raise ConfigError(f"{key}: returned the class {data.__name__}; return an object of it")
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and not hasattr(data, "__len__"):
        raise ConfigError(f"{key}: {type(data).__name__} has no length; define __len__, or return an IterableDataset")
    if type(data).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow"):
        raise ConfigError(
            f"{key}: returned a {type(data).__name__}, whose items are columns; return a Dataset of its rows, as "
            "TensorDataset(torch.from_numpy(table[...].to_numpy()))"
        )
    if isinstance(data, tuple) and all(hasattr(part, "shape") for part in data):
        raise ConfigError(f"{key}: returned a tuple of arrays; return a Dataset of samples, as TensorDataset(x, y)")
    if isinstance(data, list | tuple) and not data:
        raise DataError(f"{key}: returned an empty {type(data).__name__}; {form}")
    if not isinstance(data, Path) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise ConfigError(f"{key}: returned a value of type {type(data).__name__}; {form}")


class Several(dict[str, Samples | Iterable[Any]]):
    """Several data sets for validation, by name."""

    @property
    def fingerprint(self) -> str:
        """A hash of the names and of the fingerprint of each data set."""
        own = [(name, getattr(part, "fingerprint", "iterable")) for name, part in self.items()]
        return hashlib.sha256(repr(own).encode()).hexdigest()


def several(data: Mapping[Any, Any], split: str, open_part: Callable[[Any], Any]) -> Several:
    """Open each data set of a mapping of names.

    Raises:
        DataError: The mapping is empty, or a name or a data set can't be used.
    """
    if not data:
        raise DataError(f"recipe.data({split!r}): returned an empty dict; return data sets by name, or None for none")
    for name, part in data.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or part is None:
            raise DataError(
                f"recipe.data({split!r}): {name!r} is {'None' if part is None else 'not a name'}; give data sets by "
                "names of letters, digits, '_', '-' and '.', as {'clean': dataset, 'noisy': other}"
            )
    return Several({name: open_part(part) for name, part in data.items()})


def each_set(source: "Samples | Stream | Iterable[Any] | Several", split: str) -> dict[str, Any]:
    """Return the data sets by the prefix of their metrics: `val`, or `val/NAME` if there are several."""
    if not isinstance(source, Several):
        return {split: source}
    return {f"{split}/{name}": part for name, part in source.items()}


def size_of(source: "Samples | Stream | Iterable[Any] | Several | None") -> int:
    """Return the number of samples; 0 if it is unknown."""
    if source is None:
        return 0
    sizes = [sum(part.counts) if isinstance(part, Samples) else 0 for part in each_set(source, "").values()]
    return sum(sizes) if all(sizes) else 0


def is_used_up(data: Any) -> bool:
    """Return whether an iterable can be iterated only once: it is its own iterator, or always returns the same one."""
    data = data.samples if isinstance(data, Stream) else data
    fresh = isinstance(data, DataLoader | IterableDataset | Sequence)  # an iterator of these may start processes
    return isinstance(data, Iterator) or (not fresh and iter(data) is iter(data))


def is_map_style(data: Any) -> bool:
    """Return whether `data` has samples by index. So have Hugging Face's datasets, without a base class of torch."""
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset)
    batches = isinstance(data, Sequence | np.ndarray | Tensor)  # a list of batches, or a tensor of them
    return not batches and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def map_style(data: Any, split: str, transform: Any, seed: int) -> Samples:
    if (size := len(data)) == 0:
        raise DataError(f"recipe.data({split!r}): the dataset is empty")
    per_shard = -(-size // VIRTUAL_SHARDS)
    counts = [min(per_shard, size - start) for start in range(0, size, per_shard)]
    name = getattr(data, "fingerprint", f"{type(data).__module__}.{type(data).__qualname__}")
    fingerprint = hashlib.sha256(f"{name} {size}".encode()).hexdigest()
    return Samples(MapReader(data, per_shard), counts, fingerprint, transform, seed)


def mixture(
    data: Mapping[Any, Any], split: str, transform: Any, seed: int, options: DataOptions, timeout_s: float
) -> Samples:
    """Open a mixture, a dict of shards -> weight. One index has the shards of all data sets, in order."""
    for shards, weight in data.items():
        if not isinstance(shards, str | Path) or not isinstance(weight, int | float) or isinstance(weight, bool):
            raise DataError(
                f"recipe.data({split!r}): {shards}: {weight}: a mixture maps shards to weights; "
                "give a dict as {'wiki-*.tar': 3, 'books-*.tar': 1}"
            )
    if not data:
        raise DataError(
            f"recipe.data({split!r}): an empty mixture; give a dict as {{'wiki-*.tar': 3, 'books-*.tar': 1}}"
        )
    indices = [Index.open(find_shards(shards, options), Progress()) for shards in data]
    index = Index([shard for each in indices for shard in each.shards])
    mixed = [(len(each.shards), float(weight)) for each, weight in zip(indices, data.values(), strict=True)]
    fingerprint = hashlib.sha256(f"{index.fingerprint} {mixed}".encode()).hexdigest()
    reader = ShardReader(index, options.decoders, timeout_s)
    return Samples(reader, index.counts, fingerprint, transform, seed, mixed)


class Progress:
    """Logs the progress of indexing, at most every 5 s."""

    def __init__(self) -> None:
        self.logged_at = time.monotonic()

    def __call__(self, shard: str, done: int, total: int) -> None:
        if time.monotonic() - self.logged_at > 5:
            self.logged_at = time.monotonic()
            log.info("indexed %s: %d of %d shards", shard, done, total)


def _names_shards(data: Any) -> bool:
    return isinstance(data, str | Path) or (isinstance(data, list) and all(isinstance(d, str | Path) for d in data))
