"""Samples to tar shards in WebDataset format. The same samples give the same bytes."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import DataError


def write_shards(samples: Iterable[Mapping[str, Any]], folder: Path, prefix: str, per_shard: int) -> list[Path]:
    """Writes PREFIX-000000.tar and so on, each complete or absent, and returns them.

    A sample is `__key__`, unique and without a dot, and values by extension: bytes and text as they are, the rest by
    WebDataset's encoders (npy, json, cls, png, ...) and those for int and safetensors.

    Raises:
        DataError: if the folder has shards of that prefix, which a pattern for the new ones would match too.
    """
    assert per_shard > 0
    import webdataset  # here, for it takes a second and reading needs none of it
    from safetensors.numpy import save
    from webdataset.writer import default_handlers

    webdataset.utils.enforce_security = True
    encoders = {**default_handlers, "int": default_handlers["cls"], "safetensors": save}
    folder.mkdir(parents=True, exist_ok=True)
    if old := next(folder.glob(f"{prefix}-*.tar"), None):
        raise DataError(f"{old}: is there already; remove the shards of {prefix!r} or choose another folder")
    paths: list[Path] = []
    rest = iter(samples)
    for first in rest:
        path = folder / f"{prefix}-{len(paths):06d}.tar"
        partial = path.with_suffix(".part")
        with partial.open("wb") as file, webdataset.TarWriter(file, encoder=encoders, mtime=0) as writer:
            for sample in itertools.chain([first], itertools.islice(rest, per_shard - 1)):
                writer.write(dict(sample))
        paths.append(partial.replace(path))
    return paths
