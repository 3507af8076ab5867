"""Reads many samples of a map-style data set at once: rows of tensors, or by the data set's own `__getitems__`."""

from collections.abc import Callable
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

Empty = Callable[..., Tensor]  # (shape, dtype=...) -> an uninitialised tensor


class Rows:
    """A TensorDataset, or a Subset of one, whose batch `default_collate` would make row by row."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.checked: list[Tensor] = []  # tensors whose rows can be taken

    @classmethod
    def of(cls, dataset: Any) -> "Rows | None":
        inner = dataset
        while type(inner) is Subset:
            inner = inner.dataset
        return cls(dataset) if type(inner) is TensorDataset else None

    def take(self, items: list[Any], empty: Empty = torch.empty) -> list[Tensor] | None:
        """Return a batch; None if it has to be made sample by sample. The user may have changed tensors and indices.

        Args:
            empty: Makes the tensors of the batch.
        """
        inner = self.dataset
        try:
            while type(inner) is Subset:
                indices = inner.indices
                items = [int(indices[i]) if isinstance(indices, Tensor) else indices[i] for i in items]
                inner = inner.dataset
            rows = np.array(items)
        except (IndexError, TypeError, ValueError, KeyError):  # sample by sample, the error names the sample
            return None
        if type(inner) is not TensorDataset or rows.dtype.kind not in "iu" or rows.ndim != 1 or not self._fit(inner):
            return None
        count = len(inner)
        if rows.min() < -count or rows.max() >= count:
            return None
        at = torch.from_numpy(np.where(rows < 0, rows + count, rows).astype(np.int64))
        made = [empty((len(items), *tensor.shape[1:]), dtype=tensor.dtype) for tensor in inner.tensors]
        return [torch.index_select(each, 0, at, out=out) for each, out in zip(inner.tensors, made, strict=True)]

    def _fit(self, dataset: TensorDataset) -> bool:
        tensors = list(dataset.tensors)
        if len(tensors) != len(self.checked) or any(map(is_not, tensors, self.checked)):
            if not all(map(is_plain, tensors)):
                return False
            self.checked = tensors
        return True


def is_plain(tensor: Tensor) -> bool:
    """Return whether rows of a tensor are in memory as `default_collate` would lay them."""
    dense = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not dense or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or not len(tensor):
        return False
    return tensor.index_select(0, torch.zeros(2, dtype=torch.long)).is_contiguous()


def many_of(dataset: Any) -> Callable[[list[int]], list[Any]] | None:
    """Return a data set's `__getitems__`, unless a subclass of its class has overridden `__getitem__` only.

    torch's DataLoader would bypass that subclass's code.
    """
    for kind in type(dataset).__mro__:
        if "__getitems__" in vars(kind):
            return getattr(dataset, "__getitems__", None)
        if "__getitem__" in vars(kind):
            return None
    return None
