"""Clicks in Criteo's format: a label, 13 integers and 26 categories, from text, Parquet or shards.

A line of text has 40 fields, with tabs between: a label (0 or 1), 13 integers, and 26 categories. A category is a
hexadecimal number of 8 digits at most. An integer or a category may be empty, and becomes 0. The order is that of time.

Text and Parquet are read once, into a file of 40 int32 a row, which is mapped into memory. The code of DLRM's paper has
the same binary format (Naumov et al. 2019, arXiv:1906.00091).
"""

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch.utils.data import Dataset

from recipes.cache import build_once, digest, root
from trainer.data.shards.parquet import of_rows
from trainer.errors import ConfigError, DataError, UnavailableError, printable
from trainer.files import is_hidden
from trainer.log import log

FORMAT = 1  # of the cache; part of the hash
INTEGERS, CATEGORIES = 13, 26
FIELDS = 1 + INTEGERS + CATEGORIES
NAMES = ["label", *(f"I{i + 1}" for i in range(INTEGERS)), *(f"C{i + 1}" for i in range(CATEGORIES))]  # of columns
KINDS = ("0 or 1", *["an integer of 32 bits"] * INTEGERS, *["a hexadecimal number of 8 digits at most"] * CATEGORIES)
BLOCK = 1 << 20  # bytes that are parsed at once, few enough for a core's cache
TAB, NEWLINE, MINUS = b"\t\n-"
NO_DIGIT = 255
DIGITS = np.full(256, NO_DIGIT, np.uint8)  # the value of each byte
for value, character in enumerate("0123456789abcdef"):
    DIGITS[[ord(character), ord(character.upper())]] = value


class Clicks(Dataset[np.ndarray]):
    """The rows of files, in order: arrays (40,) of int32, whose categories are uint32 in the same bits.

    Args:
        files: Files that `prepare` has made.
        part: The first and the last of the rows, as shares of all.
    """

    def __init__(self, files: Sequence[Path], part: tuple[float, float] = (0.0, 1.0)) -> None:
        self.rows = [np.memmap(file, np.int32, "r").reshape(-1, FIELDS) for file in files]
        self.ends = np.cumsum([len(each) for each in self.rows])
        self.first, last = (round(share * int(self.ends[-1])) for share in part)
        self.count = last - self.first
        named = [[file.name, len(each)] for file, each in zip(files, self.rows, strict=True)]
        self.fingerprint = hashlib.sha256(json.dumps([FORMAT, named, self.first, last]).encode()).hexdigest()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray:
        i += self.first
        number = int(np.searchsorted(self.ends, i, "right"))
        return np.asarray(self.rows[number][i - int(self.ends[number])])

    def positives(self) -> int:
        """Count the rows whose label is 1."""
        found, start = 0, 0
        for rows, end in zip(self.rows, self.ends.tolist(), strict=True):
            own = rows[max(self.first - start, 0) : max(self.first + self.count - start, 0), 0]
            found, start = found + int(np.count_nonzero(own)), end
        return found


def files(source: str | list[str], key: str) -> list[Path]:
    """Return the files of `source`, in order of time: paths, folders and patterns. In names, day_10 follows day_9.

    Raises:
        ConfigError: There is no such file.
    """
    found: list[Path] = []
    for each in [source] if isinstance(source, str) else source:
        path = Path(each).expanduser()
        own = list(path.iterdir() if path.is_dir() else path.parent.glob(path.name))
        own = sorted((file for file in own if file.is_file() and not is_hidden(file.name)), key=natural)
        if not own:
            raise ConfigError(f"{key}={each}: there is no such file; give files in Criteo's format, or tar shards")
        found += own
    return found


def natural(path: Path) -> list[Any]:
    """Return a key that sorts names by the numbers in them."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def prepare(path: Path, cache: str | None) -> Path:
    """Return the binary file of a text or Parquet file under `cache`, and write it if it is missing.

    Raises:
        DataError: The file has a row that is not in Criteo's format.
        ConfigError: The cache can't be written.
    """
    try:
        stat = path.stat()
        identity = [FORMAT, os.path.abspath(path), stat.st_size, stat.st_mtime_ns]
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}; make it readable") from None
    made = root(cache) / "criteo" / f"{digest(identity)}.bin"
    build_once(made, "clicks", Path.exists, lambda partial: _write(path, partial, made))
    return made


def _write(path: Path, partial: Path, made: Path) -> None:
    log.info("clicks: preparing %s", path)
    count = 0
    try:
        with partial.open("wb") as file:
            for rows in _of_parquet(path) if path.suffix == ".parquet" else _of_text(path):
                rows.tofile(file)
                count += len(rows)
        if not count:
            raise DataError(f"{path}: has no row; give a file in Criteo's format")
    except BaseException:
        partial.unlink(missing_ok=True)  # once the file is repaired, it has another name
        raise
    log.info("clicks: %d rows of %s in %s", count, path.name, made)


def _of_text(path: Path) -> Iterator[np.ndarray]:
    try:
        with path.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            file: IO[bytes] = gzip.GzipFile(fileobj=plain) if packed else plain  # pyright: ignore[reportAssignmentType]
            rest, done = b"", 0
            while text := file.read(BLOCK):
                text, newline, rest = (rest + text).rpartition(b"\n")
                yield (rows := parse(text + newline, str(path), done))
                done += len(rows)
            yield parse(rest and rest + b"\n", str(path), done)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be unpacked ({error}); write it again") from None
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}; make it readable") from None


def parse(text: bytes, name: str, done: int = 0) -> np.ndarray:
    """Return rows (N, 40) of int32 of whole lines of text.

    Args:
        done: Lines of the file before these, for errors.

    Raises:
        DataError: A line is not in Criteo's format.
    """
    data = np.frombuffer(text.replace(b"\r\n", b"\n"), np.uint8)
    ends = np.flatnonzero((data == TAB) | (data == NEWLINE))
    lines = np.diff(np.flatnonzero(data[ends] == NEWLINE), prepend=-1)  # the fields of each line
    if (wrong := np.flatnonzero(lines != FIELDS)).size:
        has = int(lines[wrong[0]])
        raise DataError(f"{name}: line {done + int(wrong[0]) + 1} has {has} fields, not {FIELDS}; correct or remove it")
    starts = np.append(-1, ends[:-1])[: len(ends)] + 1
    lengths = (ends - starts).reshape(-1, FIELDS)
    starts = starts.reshape(-1, FIELDS)
    values, fine = np.empty(lengths.shape, np.int64), np.empty(lengths.shape, bool)
    values[:, :1], fine[:, :1] = _numbers(data, starts[:, :1], lengths[:, :1], 10, 1)
    numbers, kinds = slice(1, 1 + INTEGERS), slice(1 + INTEGERS, None)
    negative = (lengths[:, numbers] > 1) & (data[starts[:, numbers]] == MINUS)
    found, fine[:, numbers] = _numbers(data, starts[:, numbers] + negative, lengths[:, numbers] - negative, 10, 10)
    values[:, numbers] = np.where(negative, -found, found)
    values[:, kinds], fine[:, kinds] = _numbers(data, starts[:, kinds], lengths[:, kinds], 16, 8)
    fine[:, 0] &= (lengths[:, 0] == 1) & (values[:, 0] <= 1)
    fine[:, numbers] &= values[:, numbers] == values[:, numbers].astype(np.int32)
    if (wrong := np.argwhere(~fine)).size:
        line, field = wrong[0].tolist()
        given = data[starts[line, field] :][: lengths[line, field]].tobytes().decode(errors="replace")[:40]
        raise DataError(
            f"{name}: line {done + line + 1}, field {field + 1}: {printable(given)!r} is not {KINDS[field]}; "
            "correct or remove the line"
        )
    return values.astype(np.uint32).view(np.int32)


def _numbers(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, base: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of fields, and whether each has `most` digits of `base` at the most. An empty field is 0."""
    values, fine = np.zeros(starts.shape, np.int64), lengths <= most
    for i in range(min(most, int(lengths.max(initial=0)))):
        inside = i < lengths
        digits = DIGITS[data[np.where(inside, starts + i, 0)]]
        fine &= ~inside | (digits < base)
        values = np.where(inside, values * base + digits, values)
    return values, fine


def _of_parquet(path: Path) -> Iterator[np.ndarray]:
    rows: list[np.ndarray] = []
    for number, sample in enumerate(of_rows(path), 1):
        rows.append(of_json(sample.get("json"), f"{path}: row {number}"))
        if len(rows) == BLOCK // rows[0].nbytes:
            yield np.stack(rows)
            rows = []
    if rows:
        yield np.stack(rows)


def of_json(values: Any, place: str) -> np.ndarray:
    """Return the row (40,) of a mapping with `label`, `I1` to `I13`, and `C1` to `C26`: numbers, or text as in a line.

    Raises:
        DataError: A value is missing, or is not of its kind. A null is an empty field.
    """
    values = values if isinstance(values, Mapping) else {}
    if missing := [name for name in NAMES if name not in values]:
        raise DataError(f"{place}: has no {missing[0]}; give label, I1 to I13, and C1 to C26")
    row = np.empty(FIELDS, np.int64)
    for i, name in enumerate(NAMES):
        try:
            row[i] = _number(values[name], i)
        except (ValueError, TypeError, OverflowError):
            given = printable(str(values[name]))[:40]
            raise DataError(f"{place}: {name}={given} is not {KINDS[i]}; correct or remove it") from None
    return row.astype(np.uint32).view(np.int32)


def _number(value: Any, field: int) -> int:
    """Return the number of a field.

    Raises:
        ValueError, TypeError, OverflowError: There is none, or it is out of range.
    """
    if field and (value is None or value == ""):
        return 0
    number = int(value, 16) if isinstance(value, str) and field > INTEGERS else int(value)
    least, end = (0, 2) if not field else (-(1 << 31), 1 << 31) if field <= INTEGERS else (0, 1 << 32)
    if not least <= number < end or (number != value and not isinstance(value, str)):
        raise ValueError
    return number
