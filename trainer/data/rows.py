"""Reads many samples of a map-style data set at once: rows of tensors, or by the data set's own `__getitems__`."""

from collections.abc import Callable
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, get_worker_info


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

    def take(self, items: list[Any]) -> list[Tensor] | None:
        """Return a batch; None if it has to be made sample by sample. The user may have changed tensors and indices."""
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
        return [take(tensor, at) for tensor in inner.tensors]

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


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a tensor, in a data worker in shared memory, as `default_collate` does."""
    if get_worker_info() is None:
        return tensor.index_select(0, rows)
    shape = (len(rows), *tensor.shape[1:])
    storage: Any = tensor._typed_storage()._new_shared(len(rows) * tensor[:1].numel(), device="cpu")
    return torch.index_select(tensor, 0, rows, out=tensor.new(storage).resize_(shape))


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
