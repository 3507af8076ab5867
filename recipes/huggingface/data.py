"""Samples for a transformers model: JSON lines, folders of Hugging Face's `datasets`, tar shards."""

import hashlib
import json
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainer.checkpoint.manifest import FILE
from trainer.checkpoint.serialize import strict_json
from trainer.errors import ConfigError, DataError, printable
from trainer.files import matching

ENDINGS = (".jsonl", ".json", ".ndjson")
LIST_BYTES = 64 << 20
SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "dev", "test")}  # names in a DatasetDict


class Lines(Dataset[dict[str, Any]]):
    """The lines of files, each a JSON object. A file is read once to find its lines; a sample is read at its place."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.starts = [line_starts(file) for file in files]
        self.bases = list(accumulate((len(starts) - 1 for starts in self.starts), initial=0))
        self.open: dict[tuple[int, int], int] = {}  # of this process: a fork shares none of them
        self.fingerprint = fingerprint(files)

    def __len__(self) -> int:
        return self.bases[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        number = bisect_right(self.bases, i) - 1
        first, last = self.starts[number][i - self.bases[number] :][:2].tolist()
        key = (os.getpid(), number)
        if key not in self.open:
            self.open[key] = os.open(self.files[number], os.O_RDONLY)
        line = os.pread(self.open[key], last - first, first)
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.files[number]}: line {i - self.bases[number] + 1} is no JSON ({error})") from None
        if not isinstance(sample, dict):
            raise DataError(f"{self.files[number]}: line {i - self.bases[number] + 1} is no JSON object")
        return sample


def line_starts(file: Path) -> np.ndarray:
    """Return where each line begins, and where the last one ends, in bytes. A last line may be empty, and is none."""
    starts = [0]
    with file.open("rb") as content:
        for line in content:
            starts.append(starts[-1] + len(line))
    return np.array(starts, dtype=np.int64)


def fingerprint(files: list[Path]) -> str:
    """Return a hash of the sizes of files, and of their first and last 64 KiB."""
    found = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as content:
            found.update(f"{size} ".encode() + content.read(1 << 16))
            content.seek(max(0, size - (1 << 16)))
            found.update(content.read())
    return found.hexdigest()


def open_data(key: str, source: str | list[str], split: str) -> Any:
    """Open `source`: JSON lines, a folder that `datasets` has saved, or what Echelon reads as shards.

    Args:
        key: The setting, for messages.

    Raises:
        ConfigError: Nothing is there, or the package `datasets` is missing.
    """
    patterns = [source] if isinstance(source, str) else source
    if all(pattern.endswith(ENDINGS) for pattern in patterns):
        files = [Path(name) for pattern in patterns for name in sorted(matching(pattern))]
        if not files:
            raise ConfigError(f"{key}={source}: no such file; give a path or a pattern, as 'data/train-*.jsonl'")
        if irregular := [file for file in files if not file.is_file()]:
            raise ConfigError(f"{key}={irregular[0]}: is no regular file; give a path or a pattern of .jsonl files")
        return Lines(files)
    folder = Path(patterns[0])
    if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
        return saved_dataset(key, folder, split)
    if folder.is_dir():
        raise ConfigError(
            f"{key}={source}: is a folder without dataset_info.json, which datasets' save_to_disk writes; "
            "give such a folder, .jsonl files, or tar shards"
        )
    return source


def refuse_astray(key: str, folder: Path) -> None:
    """Refuse a saved data set whose lists name files outside of it: `datasets` would read them.

    Raises:
        ConfigError: A list can't be read, or names such a file.
    """
    try:
        names = read_list(folder / "dataset_dict.json", "splits")
        for part in (folder, *(folder / name for name in names)):
            names += [entry["filename"] for entry in read_list(part / "state.json", "_data_files")]
        if wrong := [name for name in names if not FILE.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is not the name of a file in it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{key}={folder}: {printable(str(error))}; save it again by save_to_disk") from None


def read_list(file: Path, key: str) -> list[Any]:
    return list(strict_json(file, LIST_BYTES).get(key, [])) if file.exists() else []


def saved_dataset(key: str, folder: Path, split: str) -> Any:
    try:
        from datasets import load_from_disk  # pyright: ignore[reportMissingImports] not in every environment
    except ImportError:
        raise ConfigError(
            f"{key}={folder}: needs the package datasets; pip install datasets, or give .jsonl files"
        ) from None
    refuse_astray(key, folder)
    found: Any = load_from_disk(str(folder))
    if not hasattr(found, "keys"):
        return found
    names = [name for name in SPLITS[split] if name in found]
    if not names:
        raise ConfigError(f"{key}={folder}: has the splits {', '.join(found)}, and none is named {SPLITS[split][0]}")
    return found[names[0]]
