"""Writes samples to tar shards in WebDataset format. Equal samples produce equal bytes."""

import gzip
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from trainer.annotated import PositiveInt, check_arguments
from trainer.config.targets import secure_webdataset
from trainer.data.shards.decoders import refuse_pickled
from trainer.data.shards.tar import split_name
from trainer.errors import DataError
from trainer.files import sweep_temporary, temporary_in

Progress = Callable[[str, int], None]  # called with each completed shard, and the number of samples written so far


def quiet(*_: Any) -> None:
    """Report no progress."""


@check_arguments("")
def write_shards(
    samples: Iterable[Mapping[str, Any]], folder: Path, prefix: str, per_shard: PositiveInt, progress: Progress = quiet
) -> list[Path]:
    """Write PREFIX-000000.tar and so on, each complete or absent, and return them.

    A sample is `__key__` and values by extension. Bytes and text are written unchanged. Other values are encoded by
    WebDataset's encoders (npy, json, cls, png, ...) and those for int and safetensors. Values of extensions that end in
    `.gz` are gzipped. Until all shards are written, PREFIX.incomplete exists, and `find_shards` refuses them.

    Raises:
        ConfigError: An argument has a wrong type, or is out of range.
        DataError: A key or an extension can't be read back, or shards with this prefix exist already.
    """
    # Imported here because the import takes a second, and reading does not need it.
    from webdataset.writer import TarWriter, default_handlers

    secure_webdataset()
    encoders = {**default_handlers, "int": default_handlers["cls"], "safetensors": save}
    folder.mkdir(parents=True, exist_ok=True)
    if old := next(folder.glob(f"{prefix}-*.tar"), None):
        raise DataError(f"{old}: exists already; remove the shards of {prefix!r} or choose another folder")
    sweep_temporary(folder)
    mark = folder / f"{prefix}.incomplete"
    paths: list[Path] = []
    key, done = None, 0
    rest = iter(samples)
    for first in rest:
        path = folder / f"{prefix}-{len(paths):06d}.tar"
        partial = temporary_in(folder)
        try:
            with partial.open("xb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
                for sample in itertools.chain([first], itertools.islice(rest, per_shard - 1)):
                    key, before = sample["__key__"], key
                    if key == before or split_name(f"{key}.x") != (key, "x"):
                        raise DataError(f"{path}: key {key!r}: must be unique, and without a dot after the last slash")
                    writer.write({"__key__": key, **contents(sample, encoders, path)})
                    done += 1
            mark.touch()
            paths.append(partial.replace(path))
        finally:
            partial.unlink(missing_ok=True)
        progress(path.name, done)
    mark.unlink(missing_ok=True)
    return paths


def contents(sample: Mapping[str, Any], encoders: Mapping[str, Callable[[Any], bytes]], path: Path) -> dict[str, bytes]:
    """Return a sample's members, without those that WebDataset adds when reading (`__url__`)."""
    found = {}
    for extension, value in sample.items():
        if extension.startswith("__"):
            continue
        name = f"{path}: {sample['__key__']!r}.{extension}"
        refuse_member(name, extension)
        kind = extension.removesuffix(".gz")
        encoder = encoders.get(kind.rpartition(".")[2].lower())
        if isinstance(value, bytes | str):
            found[extension] = value if isinstance(value, bytes) else value.encode()
        elif encoder is None:
            raise DataError(f"{name}: no encoder for {type(value).__name__}; give bytes")
        else:
            found[extension] = encoder(value) if kind == extension else gzip.compress(encoder(value), mtime=0)
    return found


def refuse_member(name: str, extension: str) -> None:
    """Refuse a member that WebDataset would leave out, or that a reader would refuse, such as a pickle."""
    if not extension or extension.startswith("_"):
        raise DataError(f"{name}: {extension!r} is not a member's extension; rename it, as 'jpg'")
    try:
        refuse_pickled(extension)
    except ValueError as error:
        raise DataError(f"{name}: a reader would refuse it: {error}") from None
