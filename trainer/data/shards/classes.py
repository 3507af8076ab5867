"""Makes samples from a folder with one subfolder per class. classes.json next to the shards has the names."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint.serialize import strict_json
from trainer.errors import DataError
from trainer.files import write_whole

CLASSES = "classes.json"  # a list: the name of class 0, of class 1, and so on
MOST_BYTES = 64 << 20


def read_classes(file: Path) -> list[str]:
    try:
        names = strict_json(file, MOST_BYTES)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("is no list of names")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: can't be read ({error}); give a JSON list of names, or remove it") from None
    return names


def with_classes(found: Mapping[str, Mapping[str, Path]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield samples with the number of their class as `cls`. A sample's class is the first folder of its key.

    Samples are shuffled, so that each shard has samples of all classes. classes.json in `folder` lists the names. If it
    exists already, its numbers are used, so that a second split has the same numbers as the first.

    Args:
        found: The files of each sample by key and extension.

    Raises:
        DataError: A sample is in no folder or in an unknown class's folder, or has its own `cls`. Or each of its file
            names has several dots.
    """
    file = folder / CLASSES
    own = sorted({key.partition("/")[0] for key in found if "/" in key})
    names = read_classes(file) if file.is_file() else own
    number = {name: str(i) for i, name in enumerate(names)}
    for key, files in found.items():
        path, (name, slash, _) = next(iter(files.values())), key.partition("/")
        if not slash:
            raise DataError(f"{path}: is in no folder of a class; move it into one")
        if name not in number:
            raise DataError(f"{path}: {name} is no class of {file}; remove the folder, or that file with its shards")
        if all("." in extension.removesuffix(".gz") for extension in files):
            raise DataError(f"{path}: a key ends at the first dot, so this is a part of {key!r}; rename it to one dot")
        if "cls" in files:
            raise DataError(f"{files['cls']}: --classes gives each sample a cls; remove this file")
    if found and not file.is_file():
        write_whole(file, (json.dumps(names, indent=0) + "\n").encode())
    keys = list(found)
    for i in np.random.default_rng(0).permutation(len(keys)):
        yield read_files(keys[i], found[keys[i]]) | {"cls": number[keys[i].partition("/")[0]]}


def read_files(key: str, files: Mapping[str, Path]) -> dict[str, Any]:
    return {"__key__": key, **{extension: path.read_bytes() for extension, path in files.items()}}
