"""Reads slices of a checkpoint's tensors from the files of all ranks that have them.

    state.json, optimizer.safetensors           tensors that one rank had whole
    part-00003.json, part-00003.safetensors     those of rank 3: whole tensors, or slices along one dimension

A checkpoint written by any number of ranks, in any layout, therefore loads into any other layout.
"""

from bisect import insort
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.manifest import Damaged, opened
from trainer.checkpoint.safetensors_buffer import DTYPES
from trainer.checkpoint.serialize import SECTION, STATE, Part, decode, read_json
from trainer.comm.slices import Slice

SECTIONS = ("model", "optimizer")  # sections that may be split into parts
PART_SECTIONS = (*SECTIONS, "callbacks")
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def part_section(rank: int) -> str:
    return f"part-{rank:05d}"


def is_part_section(name: str) -> bool:
    return name.startswith("part-")


class Piece(NamedTuple):
    """A tensor in a safetensors file."""

    handle: Any  # of safetensors
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, *slices: Slice) -> Tensor:
        """Return a copy of the intersection of the slices. If two are along the same dimension, the last one wins."""
        if not self.shape:
            return self.handle.get_tensor(self.name).clone()
        index = [slice(None)] * len(self.shape)
        for dimension, start, stop in slices:
            index[dimension] = slice(start, stop)
        return self.handle.get_slice(self.name)[tuple(index)].clone()  # the mapped file may be truncated later


class Stored:
    """A tensor of a checkpoint whose slices may be in several files. Only requested slices are read.

    Args:
        shape: The shape of the whole tensor. A tensor without dimensions has one index along dimension 0.
        dimension: The dimension along which it is sliced.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, dimension: int = 0) -> None:
        self.shape, self.dtype, self.dimension = shape, dtype, dimension
        self.length = self._length(shape)
        self.pieces: list[tuple[int, Piece]] = []  # each with its first index in the whole tensor

    def _length(self, shape: tuple[int, ...]) -> int:
        return shape[self.dimension] if shape else 1

    def add(self, start: int, piece: Piece) -> None:
        """Add a slice that begins at `start`; raise ValueError if it is not a slice of this tensor."""
        shape, d = piece.shape, self.dimension
        same = len(shape) == len(self.shape) and shape[:d] + shape[d + 1 :] == self.shape[:d] + self.shape[d + 1 :]
        if not same or not 0 <= start <= start + self._length(shape) <= self.length:
            where = f"from {start} on along dimension {d}"
            raise ValueError(f"{piece.name} of {shape} {where} is no part of {self.shape}")
        insort(self.pieces, (start, piece), key=lambda item: (item[0], item[1].shape))  # an empty one first

    def is_whole(self) -> bool:
        end = 0
        for start, piece in self.pieces:
            if length := self._length(piece.shape):
                if start != end:
                    return False
                end += length
        return end == self.length

    def read(self, dimension: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Read the slice `start` to `stop` (None: to the end) along any dimension, in new memory on the CPU."""
        if not self.shape:
            return self.pieces[0][1].read()
        size = self.shape[dimension]
        stop = size if stop is None else stop
        assert 0 <= start <= stop <= size, (dimension, start, stop, self.shape)
        found = []
        for first, piece in self.pieces:
            low, high = 0, self._length(piece.shape)
            if dimension == self.dimension:
                low, high = max(start - first, 0), min(stop - first, high)
            if low < high and start < stop:
                found.append(piece.read(Slice(dimension, start, stop), Slice(self.dimension, low, high)))
        if not found:
            return torch.empty((*self.shape[:dimension], stop - start, *self.shape[dimension + 1 :]), dtype=self.dtype)
        return found[0] if len(found) == 1 else torch.cat(found, self.dimension)


def open_parts(folder: Path, names: Collection[str], world: int) -> dict[str, Any]:
    """Return the sections `SECTIONS` of a checkpoint of `world` ranks, with a `Stored` for each tensor.

    The section `callbacks` is included only if ranks have parts of it. Only files in `names`, the manifest's, are read.

    Raises:
        Damaged: A file has content that no run writes, a rank's file is missing, or slices are missing or duplicated.
    """
    found: dict[str, Any] = {}
    files = [name for name in sorted(names) if is_part_section(name) and name.endswith(".json")]
    path = folder
    try:
        for file in (STATE, *files):
            path = folder / file
            for name, value in _sections(path, names):
                found[name] = _merged(found[name], value, name) if name in found else value
        path = folder
        if files and files != [f"{part_section(rank)}.json" for rank in range(world)]:
            raise ValueError(f"parts of {world} rank(s) are expected; it has {', '.join(files)[:200]}")
        for name, tensor in _tensors(found, ""):
            if not tensor.is_whole():
                raise ValueError(f"slices of {name} are missing or in two files")
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise Damaged(f"{path}: can't be read as parts ({type(error).__name__}: {error})") from error
    return found


def read_all(value: Any) -> Any:
    """Replace each `Stored` in nested dicts and lists with its tensor."""
    if isinstance(value, Stored):
        return value.read()
    if isinstance(value, dict):
        return {key: read_all(item) for key, item in value.items()}
    return type(value)(map(read_all, value)) if isinstance(value, (list, tuple)) else value


def _sections(path: Path, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    content, known = read_json(path.parent, path.name, names), SECTIONS
    if path.name != STATE:
        content, known = content[path.stem], PART_SECTIONS
        if foreign := content.keys() - set(known):
            raise ValueError(f"{sorted(foreign)} can't be in parts")
    for name in known:
        if name in content:
            file = _File(path.parent, names, name if path.name == STATE else path.stem)
            yield name, _stored(decode(content[name], file))


class _File(Mapping[str, Piece]):
    """The tensors of a safetensors file by name. The file is opened on first access."""

    def __init__(self, folder: Path, names: Collection[str], section: str) -> None:
        if not SECTION.fullmatch(section):
            raise ValueError(f"section {section!r}")
        self.folder, self.names, self.file = folder, names, f"{section}.safetensors"

    @cached_property
    def handle(self) -> Any:
        if self.file not in self.names:
            raise ValueError(f"its manifest does not name {self.file}")
        with opened(self.folder, self.file) as file:
            return safe_open(file, "pt")  # stays mapped

    def __getitem__(self, name: str) -> Piece:
        found = self.handle.get_slice(name)
        return Piece(self.handle, name, tuple(found.get_shape()), TORCH_DTYPES[found.get_dtype()])

    def __iter__(self) -> Iterator[str]:
        return iter(self.handle.keys())

    def __len__(self) -> int:
        return len(self.handle.keys())


def _stored(value: Any) -> Any:
    """Replace each tensor or part in nested dicts and lists with a `Stored`."""
    if isinstance(value, dict):
        return {key: _stored(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, Piece):
        return type(value)(map(_stored, value))
    if isinstance(value, Piece):
        value = Part(value, value.shape)
    if not isinstance(value, Part):
        return value
    stored = Stored(value.shape, value.tensor.dtype, value.dimension)
    stored.add(value.start, value.tensor)
    return stored


def _merged(one: Any, other: Any, name: str) -> Any:
    """Merge a section that is in two files; each tensor in both gets the slices of both."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: _merged(one[key], other[key], f"{name}/{key}") for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    if not isinstance(one, Stored) or not isinstance(other, Stored):
        raise ValueError(f"{name} is in two files")
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise ValueError(f"{name} is {one.dtype} {one.shape} in one file, and {other.dtype} {other.shape} in another")
    if one.dimension != other.dimension:
        raise ValueError(f"{name} is cut along dimension {one.dimension} in one file, and {other.dimension} in another")
    for start, piece in other.pieces:
        one.add(start, piece)
    return one


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Stored]]:
    if isinstance(value, Stored):
        yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from _tensors(item, f"{name}/{key}".strip("/"))
