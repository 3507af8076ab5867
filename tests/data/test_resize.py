"""Batches that are cut, or made of the same samples again."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from trainer.data.resize import cut_batch, repeat_batch
from trainer.errors import DataError


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclass
class Item:
    x: Tensor


KEY = "callbacks.mine"
NUMBERS = torch.arange(7)
BATCHES: list[Any] = [
    NUMBERS, {"a": NUMBERS, "b": [NUMBERS, (NUMBERS, None)]}, UserDict(a=NUMBERS), Pair(NUMBERS, Item(NUMBERS)),
]  # fmt: skip


def numbers(value: Any) -> list[list[int]]:
    """Of every tensor in it."""
    if isinstance(value, Tensor):
        return [value.tolist()]
    items = value.values() if hasattr(value, "values") else [value.x] if isinstance(value, Item) else value or ()
    return [each for item in items for each in numbers(item)]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("most", "sizes"), [(7, [7]), (9, [7]), (6, [3, 4]), (3, [2, 2, 3]), (1, [1] * 7)])
def test_the_parts_are_the_batch_in_order(batch, most, sizes):
    parts = cut_batch(batch, most, KEY)
    assert [type(part) for part in parts] == [type(batch)] * len(sizes)
    for tensors in zip(*map(numbers, parts), strict=True):
        assert [len(tensor) for tensor in tensors] == sizes
        assert [number for tensor in tensors for number in tensor] == NUMBERS.tolist()


@pytest.mark.parametrize("batch", BATCHES)
def test_samples_come_again_in_a_larger_batch(batch):
    for size in (3, 7, 10):
        assert all(each == [i % 7 for i in range(size)] for each in numbers(repeat_batch(batch, size, KEY)))


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        ({"x": NUMBERS, "key": ["a"] * 7}, r"batch\['key'\]\[0\] is a str"),
        ({"x": NUMBERS, "n": 7}, r"batch\['n'\] is a int"),
        ([NUMBERS, torch.zeros(2, 7)], r"batch\[1\] is a tensor of shape \[2, 7\]"),
        ([NUMBERS, torch.tensor(7)], r"batch\[1\] is a tensor of shape \[\]"),
        ([NUMBERS, pack_sequence([NUMBERS])], r"batch\[1\] is a PackedSequence"),
    ],
)
def test_a_batch_that_has_no_rows_of_samples_is_refused(batch, part):
    for change in (lambda: cut_batch(batch, 3, KEY), lambda: repeat_batch(batch, 9, KEY)):
        with pytest.raises(DataError, match=rf"^callbacks\.mine: {part}.* can't be cut into 7 .*, or leave mine out$"):
            change()
