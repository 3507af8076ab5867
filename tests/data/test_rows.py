"""Rows of tensors are the batches of `default_collate`; a data set's `__getitems__` is used where it is newer."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from trainer.data.rows import Rows, many_of

X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20)
ITEMS = np.array([3, 0, 9, 3])
WHOLE = TensorDataset(X, Y)
HALF = Subset(WHOLE, range(19, 1, -2))


@pytest.mark.parametrize(
    "dataset",
    [
        WHOLE, TensorDataset(Y), HALF, Subset(HALF, torch.tensor([8, 7, 6, 0] * 3)),
        TensorDataset(Y.unfold(0, 4, 1)[:, :-1], X[:17, 1]), TensorDataset(X.t().contiguous().t()),
        TensorDataset(torch.arange(240.0).view(10, 2, 3, 4).to(memory_format=torch.channels_last)),
    ],
)  # fmt: skip
def test_rows_are_the_collated_samples(dataset: Any) -> None:
    rows = Rows.of(dataset)
    items = ITEMS % len(dataset)
    expected = default_collate([dataset[i] for i in items.tolist()])
    found = rows.take(items.tolist())
    assert found is not None
    assert type(found) is type(expected) and all(map(torch.equal, found, expected))
    assert [each.stride() for each in found] == [each.stride() for each in expected]


def test_rows_are_taken_into_given_memory() -> None:
    """A worker's slot, in which the rank finds them without a copy."""
    given = [torch.empty(4, 3), torch.empty(4, dtype=torch.int64)]
    rest = iter(given)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = next(rest)
        assert made.shape == shape and made.dtype == dtype
        return made

    found = Rows.of(WHOLE).take(ITEMS.tolist(), empty)
    assert found[0] is given[0] and found[1] is given[1]
    assert torch.equal(given[0], X[ITEMS]) and torch.equal(given[1], Y[ITEMS])


class Own(TensorDataset):
    """Returns something else than TensorDataset."""


@pytest.mark.parametrize(
    "dataset",
    [
        Own(X), ConcatDataset([WHOLE, WHOLE]), Subset(Own(X), [1]), [1, 2], TensorDataset(X.clone().requires_grad_()),
        TensorDataset(X.to("meta")), TensorDataset(X.to(torch.complex64).conj()), TensorDataset(X.to_sparse()),
        Subset(WHOLE, [[0, 1]] * 9), Subset(WHOLE, [True] * 9), Subset(WHOLE, [0.0] * 9),
        Subset(WHOLE, [20, 21, 22, 23]), Subset(WHOLE, [0]), Subset(WHOLE, {3: 1}),
    ],
)  # fmt: skip
def test_all_others_are_read_sample_by_sample(dataset: Any) -> None:
    rows = Rows.of(dataset)
    assert rows is None or rows.take([3, 0]) is None


def test_negative_indices_count_from_the_end() -> None:
    found = Rows.of(Subset(WHOLE, [-1, 4])).take([0, 1])
    assert found is not None and found[1].tolist() == [19, 4]


def test_tensors_and_indices_that_the_user_changed_are_read_as_they_are_now() -> None:
    """As an epoch's callback may, which draws another subset or relabels the samples."""
    whole = TensorDataset(X.clone(), Y.clone())
    part = Subset(whole, [0, 1])
    rows = Rows.of(part)
    rows.take([0])
    part.indices = [5, 6]
    whole.tensors = (X, Y + 100)
    assert [each.tolist() for each in rows.take([1])] == [[X[6].tolist()], [106]]
    whole.tensors = (X.clone().requires_grad_(), Y)
    assert rows.take([1]) is None


class Many(Dataset[int]):
    def __getitem__(self, i: int) -> int:
        return i

    def __getitems__(self, items: list[int]) -> list[int]:
        return [10 * i for i in items]


class OnlyMany(Dataset[int]):
    def __getitems__(self, items: list[int]) -> list[int]:
        return items


class Overridden(Many):
    """torch's DataLoader would bypass this."""

    def __getitem__(self, i: int) -> int:
        return -i


class Delegating:
    def __init__(self) -> None:
        self.inner = Many()

    def __getitem__(self, i: int) -> int:
        return -i

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Switched(Many):
    __getitems__ = None  # pyright: ignore[reportAssignmentType] as torch allows


def test_own_getitems_is_used_unless_the_class_has_a_newer_getitem() -> None:
    for used in (Many(), OnlyMany(), Subset(Many(), [2, 1])):
        assert len(many_of(used)([0, 1])) == 2
    for unused in (Overridden(), Delegating(), Switched(), X, [1], np.arange(3)):
        assert many_of(unused) is None
