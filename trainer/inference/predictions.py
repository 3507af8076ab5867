"""Collects predictions over batches and ranks, in the data's order, and writes them to a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from trainer.checks.recipe import describe
from trainer.comm.ranks import Ranks
from trainer.errors import ConfigError
from trainer.files import finite, write_whole
from trainer.inference.shown import short
from trainer.process.notebook import table

FORMATS = (".jsonl", ".safetensors")
ROWS = 10  # that a notebook shows
UNNAMED = "prediction"  # the name, in a file, of what a recipe returns without names

Column = Tensor | list[Any]  # a row for each sample


class Predictions:
    """Rows for samples, in the data's order.

    Attributes:
        index: The number of each sample in the data; samples that can't be read are missing.
        keys: The key of each sample of a shard; for a dataset, the sample's number as text.
        columns: By name, a tensor (samples, ...) or a list of plain values. An unnamed output is `prediction`.
    """

    def __init__(self) -> None:
        self.index: list[int] = []
        self.keys: list[str] = []
        self.columns: dict[str, Column] = {}
        self._parts: dict[str, list[Column]] = {}

    def __repr__(self) -> str:
        return f"Predictions({len(self)} samples: {', '.join(self.columns)})"

    def _repr_html_(self) -> str:
        """Return the first rows as a table."""
        columns = self.columns.values()
        shown = [[key, *(short(column[row]) for column in columns)] for row, key in enumerate(self.keys[:ROWS])]
        return f"<p>{len(self):,} samples</p>{table(shown, ['sample', *self.columns])}"

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def add(self, index: list[int], keys: list[str], rows: dict[str, Column]) -> None:
        if self._parts and self._parts.keys() != rows.keys():
            names = f"{', '.join(rows)} for one batch and {', '.join(self._parts)} for another"
            raise ConfigError(f"recipe.predict(): returned {names}; return the same names for each batch")
        self.index += index
        self.keys += keys
        for name, column in rows.items():
            self._parts.setdefault(name, []).append(column)

    def gathered(self, ranks: Ranks) -> "Predictions":
        """Return the rows of all ranks, on every rank. A collective."""
        own = {name: joined(parts) for name, parts in self._parts.items()}
        found = ranks.gather([self.index, self.keys, {name: form(column) for name, column in own.items()}])
        whole = Predictions()
        for index, keys, _ in found:
            whole.index += index
            whole.keys += keys
        names = list(dict.fromkeys(name for *_, forms in found for name in forms))
        for name in names:
            forms = [forms.get(name) for *_, forms in found]  # None: the rank has no sample
            kinds = {json.dumps([each[0], each[1][1:]]) for each in forms if each}
            if len(kinds) > 1 or "list" in next(iter(kinds)):
                lists = ranks.gather(plain(own[name]) if name in own else [])
                whole.columns[name] = [row for rows in lists for row in rows]
            else:
                rows = [broadcast(ranks, source, own.get(name), *each) for source, each in enumerate(forms) if each]
                whole.columns[name] = torch.cat(rows)
        return whole

    def write(self, file: Path) -> None:
        """Write JSON lines or safetensors, by the suffix of the file. In JSON, NaN and infinity become null.

        Raises:
            ConfigError: The suffix is unknown, the format lacks a column's values, or the file can't be written.
        """
        refuse_format(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, self._lines(file) if file.suffix == ".jsonl" else self._tensors(file))
        except OSError as error:
            raise ConfigError(f"{file}: can't be written: {error.strerror}; give another file") from None

    def _lines(self, file: Path) -> bytes:
        columns = {name: plain(column) for name, column in self.columns.items()}
        lines = []
        for row, (number, key) in enumerate(zip(self.index, self.keys, strict=True)):
            named = {"index": number} | ({} if key == str(number) else {"key": key})
            line = finite(named | {name: column[row] for name, column in columns.items()})
            try:
                lines.append(json.dumps(line, allow_nan=False))
            except TypeError:  # `rows_of` has refused anything else
                way_out = "give a .safetensors file, or return torch.view_as_real(...)"
                raise ConfigError(f"{file}: predictions are complex numbers, which JSON lacks; {way_out}") from None
        return "".join(f"{line}\n" for line in lines).encode()

    def _tensors(self, file: Path) -> bytes:
        for name, column in self.columns.items():
            if not isinstance(column, Tensor):
                raise ConfigError(f"{file}: {name!r} is no tensor with a row for each sample; give a .jsonl file")
        tensors = {name: column.contiguous() for name, column in self.columns.items() if isinstance(column, Tensor)}
        return save({"index": torch.tensor(self.index), **tensors})


def refuse_format(file: Path) -> None:
    if file.suffix not in FORMATS:
        raise ConfigError(f"{file}: predictions are written as {' or '.join(FORMATS)}; give a file of such a name")


def rows_of(output: Any, samples: int) -> dict[str, Column]:
    """Return a batch's output of `recipe.predict` as columns on the CPU.

    A tuple of tensors is refused, because it may be several outputs.
    """
    named = output if isinstance(output, Mapping) else {UNNAMED: output}
    rows: dict[str, Column] = {}
    for name, column in named.items():
        if not isinstance(name, str) or name in ("index", "key"):
            raise ConfigError(f"recipe.predict(): returned the name {name!r}; give another text")
        if isinstance(column, Tensor) and column.dim():
            rows[name] = column.detach().cpu()
        elif isinstance(column, tuple) and any(isinstance(each, Tensor) and each.dim() for each in column):
            raise ConfigError(
                f"recipe.predict(): returned a tuple of tensors as {name!r}; return several outputs by name, as "
                "{'logits': ..., 'hidden': ...}, or a list with a row for each sample"
            )
        elif isinstance(column, Sequence) and not isinstance(column, str | bytes):
            rows[name] = [plain_row(each, name) for each in column]
        else:
            raise ConfigError(
                f"recipe.predict(): returned {describe(column)} as {name!r}; return a tensor (samples, ...), a list "
                "with a value for each sample, or a dict of these by name"
            )
        if len(rows[name]) != samples:
            raise ConfigError(
                f"recipe.predict(): returned {len(rows[name])} rows as {name!r} for {samples} samples; return one each"
            )
    return rows


def plain_row(row: Any, name: str) -> Any:
    """Return a row of a list as plain JSON values. Tensors and NumPy numbers inside are converted."""
    if isinstance(row, Tensor) and not row.is_complex():
        return row.detach().cpu().tolist()
    try:
        return json.loads(json.dumps(row, default=listed))
    except (TypeError, ValueError, RecursionError) as error:
        way_out = "return tensors, numbers, texts, or lists and dicts of these"
        raise ConfigError(f"recipe.predict(): {name!r} has a row that JSON lacks ({error}); {way_out}") from None


def listed(value: Any) -> Any:
    value = value.detach().cpu() if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor | np.ndarray | np.generic):
        raise TypeError(describe(value))
    return value.tolist()


def joined(parts: list[Column]) -> Column:
    """Concatenate tensors of one dtype and row shape; return anything else as a list."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts) and len({(part.dtype, part.shape[1:]) for part in tensors}) == 1:
        return torch.cat(tensors)
    return [row for part in parts for row in plain(part)]


def plain(column: Column) -> list[Any]:
    return column.tolist() if isinstance(column, Tensor) else column


def form(column: Column) -> tuple[str, list[int]]:
    """Return a tensor's dtype and shape, or "list" and the length."""
    if isinstance(column, Tensor):
        return str(column.dtype).removeprefix("torch."), list(column.shape)
    return "list", [len(column)]


def broadcast(ranks: Ranks, source: int, own: Column | None, dtype: str, shape: list[int]) -> Tensor:
    """Return rank `source`'s tensor on every rank. A collective."""
    if ranks.rank == source and isinstance(own, Tensor):
        value = own.contiguous()
    else:
        value = torch.empty(shape, dtype=getattr(torch, dtype))
    if ranks.world > 1 and value.numel():
        dist.broadcast(value.flatten().view(torch.uint8), source, group=ranks.host)
    return value
