"""Opens a recipe's `data` as one of two kinds: samples by reference, or an iterable of batches."""

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer.config.options import DataOptions
from trainer.data.iterable import Iterated, is_used_up
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.transforms import Maps
from trainer.data.source import MapReader, NamedSources, Samples, Source
from trainer.data.stream import Stream, is_stream
from trainer.errors import ConfigError, DataError
from trainer.log import log
from trainer.process.environment import Place
from trainer.rng import RECIPE_DATA, mix, seed_all

NAME = re.compile(r"[\w.-]+")  # of a data set for validation
VIRTUAL_SHARDS = 65536  # the most shards of a map-style dataset, so many that shuffling moves single samples
Transform = Callable[[Any, Generator], Any]


def in_turns(place: Place, gather: Callable[[Any], list[Any]], call: Callable[[], Any]) -> Any:
    """Call on rank 0 first, which prepares shared files, then on one rank of each other node, then on all others.

    A collective. `gather` returns the values of all ranks on every rank.
    """
    turn = 2 if place.local_rank else 1 if place.rank else 0
    for _ in range(turn):
        gather(None)
    result = call()
    for _ in range(turn, 2):
        gather(None)
    return result


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
) -> Source | NamedSources | None:
    """Open the recipe's data of `split`; None if there is none (validation only).

    A mapping of names to data sets is opened as `NamedSources`, but not for training.

    Args:
        validates: The samples are not for training, so `val_transform` applies. None: unless `split` is "train".
    """
    # Both splits get the same seed, so that a `random_split` in `data` is the same both times.
    seed_all(mix(seed, RECIPE_DATA))
    data, options = returned(recipe, split), options or DataOptions()
    decoders = [*options.decoders, *getattr(recipe, "decoders", ())]
    transform = transform_of(recipe, options, split != "train" if validates is None else validates)

    def open_one(data: Any) -> Source:
        return open_data(transform, data, split, seed, options, decoders, timeout_s)

    if data is None:
        return None
    if isinstance(data, Mapping) and not any(isinstance(weight, int | float) for weight in data.values()):
        if split != "train":
            return named(data, split, open_one)
        if any(hasattr(part, "__getitem__") and not isinstance(part, str) for part in data.values()):
            raise ConfigError("recipe.data('train'): returned a dict of data sets; return one of them, as data[split]")
    return open_one(data)


def returned(recipe: Any, split: str) -> Any:
    """Return `recipe.data(split)`. It can't ask for the rank, since the run is planned before there are ranks.

    A recipe that looks the split up in a dict raises KeyError for one that it lacks.
    """
    try:
        return recipe.data(split)
    except KeyError as error:
        if error.args != (split,):
            raise
        fix = {"val": "return None if there is no validation", "train": "return the data to train on"}.get(
            split, "give the name of a split that it has"
        )
        raise ConfigError(f"recipe.data({split!r}): knows no such split; {fix}") from None
    except (ValueError, RuntimeError) as error:
        if "process group has not been initialized" not in str(error):
            raise
        raise ConfigError(
            f"recipe.data({split!r}): asks torch.distributed for the rank, as DistributedSampler(dataset) does, and "
            "the run is planned before there are ranks; return the DataLoader without it, whose samples the ranks share"
        ) from None


def transform_of(recipe: Any, options: DataOptions, validates: bool) -> Transform | None:
    """Return `data.map` followed by the recipe's `transform`.

    For samples that are not trained on, they are replaced by the maps' `val_map` and the recipe's `val_transform`.
    """
    own, maps = getattr(recipe, "transform", None), options.map
    if validates:
        own, maps = getattr(recipe, "val_transform", own), [getattr(each, "val_map", each) for each in maps]
    return Maps(maps, own) if maps else own


def open_data(
    transform: Transform | None,
    data: Any,
    split: str,
    seed: int,
    options: DataOptions,
    decoders: Sequence[Callable[[str, bytes], Any]],
    timeout_s: float,
) -> Source:
    """Open one data set that the recipe has returned.

    Args:
        decoders: `data.decoders`, followed by the recipe's.
    """
    refuse_no_data(data, split)
    if options.shuffle_buffer and split == "train":
        refuse_buffer(data, options)
    if _names_shards(data):
        index = Index.open(find_shards(data, options), Progress())
        reader = ShardReader(index, decoders, timeout_s)
        return Samples(reader, index.counts, index.fingerprint, transform, seed)
    if isinstance(data, Mapping):
        return mixture(data, split, transform, seed, options, decoders, timeout_s)
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
        return iterated(Stream(data, transform, seed, options.shuffle_buffer), data, split)
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
    return iterated(data, data, split)


def iterated(source: Any, data: Any, split: str) -> Iterated:
    """Return the source, unless the recipe's `data` can be validated only once."""
    if split != "train" and is_used_up(data):
        raise DataError(
            f"recipe.data({split!r}): a {type(data).__name__} is used up by the first validation; "
            "return a list of batches, or an object whose __iter__ starts over"
        )
    return Iterated(source)


def refuse_no_data(data: Any, split: str) -> None:
    """Raise a ConfigError for a wrong type, and a DataError for an empty list, as from `glob` in a missing folder."""
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


def refuse_buffer(data: Any, options: DataOptions) -> None:
    """Refuse a shuffle buffer for training data that is no stream of samples."""
    by_place = _names_shards(data) or isinstance(data, Mapping) or is_map_style(data)
    if by_place or not is_stream(data):
        why = "are shuffled anyway" if by_place else "come in batches"
        fix = "leave it out" if by_place else "shuffle them in the iterable"
        raise ConfigError(
            f"data.shuffle_buffer={options.shuffle_buffer}: is for streams of samples, and the samples of "
            f"recipe.data('train') {why}; {fix}"
        )


def named(data: Mapping[Any, Any], split: str, open_part: Callable[[Any], Source]) -> NamedSources:
    """Open each data set of a mapping of names."""
    if not data:
        raise DataError(f"recipe.data({split!r}): returned an empty dict; return data sets by name, or None for none")
    for name, part in data.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or part is None:
            raise DataError(
                f"recipe.data({split!r}): {name!r} is {'None' if part is None else 'not a name'}; give data sets by "
                "names of letters, digits, '_', '-' and '.', as {'clean': dataset, 'noisy': other}"
            )
    return NamedSources({name: open_part(part) for name, part in data.items()})


def is_map_style(data: Any) -> bool:
    """Return whether `data` has samples by index, as Hugging Face's data sets have without a base class of torch."""
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
    data: Mapping[Any, Any],
    split: str,
    transform: Any,
    seed: int,
    options: DataOptions,
    decoders: Sequence[Callable[[str, bytes], Any]],
    timeout_s: float,
) -> Samples:
    """Open a mixture, a dict from shards to weights. One index has the shards of all data sets, in order."""
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
    index = Index([shard for part in indices for shard in part.shards])
    mixed = [(len(part.shards), float(weight)) for part, weight in zip(indices, data.values(), strict=True)]
    fingerprint = hashlib.sha256(f"{index.fingerprint} {mixed}".encode()).hexdigest()
    reader = ShardReader(index, decoders, timeout_s)
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
