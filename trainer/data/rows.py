"""Reads many samples of a map-style data set at once: rows of tensors, or by the data set's own `__getitems__`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, get_worker_info


class Rows:
    """A TensorDataset, or a Subset of one, whose batch `default_collate` would make row by row.

    Args:
        places: The row of each sample; None: all rows in their order.
    """

    def __init__(self, tensors: tuple[Tensor, ...], places: NDArray[np.int64] | None) -> None:
        self.tensors, self.places = tensors, places

    @classmethod
    def of(cls, dataset: Any) -> "Rows | None":
        places: NDArray[np.int64] | None = None
        while type(dataset) is Subset:
            own = np.asarray(dataset.indices, np.int64)
            places, dataset = own if places is None else own[places], dataset.dataset
        if type(dataset) is not TensorDataset or not all(map(is_plain, dataset.tensors)):
            return None
        return cls(dataset.tensors, places)

    def take(self, items: NDArray[np.int64]) -> list[Tensor]:
        rows = torch.from_numpy(items if self.places is None else self.places[items])
        return [take(tensor, rows) for tensor in self.tensors]


def is_plain(tensor: Tensor) -> bool:
    """Return whether rows of a tensor are in memory as `default_collate` would lay them."""
    dense = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not dense or tensor.requires_grad or not len(tensor):
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
