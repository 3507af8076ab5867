"""Samples to tar shards in WebDataset format. The same samples give the same bytes."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from trainer.data.tar import split_name
from trainer.errors import DataError
from trainer.targets import make_webdataset_careful

Progress = Callable[[str, int], None]  # called with a shard, once it is complete, and the samples written so far


def quiet(*_: Any) -> None:
    """Progress that nobody looks at."""


def write_shards(
    samples: Iterable[Mapping[str, Any]], folder: Path, prefix: str, per_shard: int, progress: Progress = quiet
) -> list[Path]:
    """Writes PREFIX-000000.tar and so on, each complete or absent, and returns them.

    A sample is `__key__` and values by extension: bytes and text as they are, the rest by
    WebDataset's encoders (npy, json, cls, png, ...) and those for int and safetensors.

    Raises:
        DataError: for a key that can't be read back, and if the folder has shards of that prefix already.
    """
    assert per_shard > 0
    # Here, for it takes a second and reading needs none of it.
    from webdataset.writer import TarWriter, default_handlers, make_encoder

    make_webdataset_careful()
    encoder = make_encoder({**default_handlers, "int": default_handlers["cls"], "safetensors": save})
    folder.mkdir(parents=True, exist_ok=True)
    if old := next(folder.glob(f"{prefix}-*.tar"), None):
        raise DataError(f"{old}: is there already; remove the shards of {prefix!r} or choose another folder")
    paths: list[Path] = []
    key, done = None, 0
    rest = iter(samples)
    for first in rest:
        path = folder / f"{prefix}-{len(paths):06d}.tar"
        partial = path.with_suffix(".part")
        with partial.open("wb") as file, TarWriter(file, encoder=encoder, mtime=0) as writer:
            for sample in itertools.chain([first], itertools.islice(rest, per_shard - 1)):
                key, before = sample["__key__"], key
                if key == before or split_name(f"{key}.x") != (key, "x"):
                    raise DataError(f"{path}: key {key!r}: must be unique, and without a dot after the last slash")
                writer.write(dict(sample))
                done += 1
        paths.append(partial.replace(path))
        progress(path.name, done)
    return paths
