"""The states of many ranks are merged one by one: the mean, with one state in memory."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.callback import Callback
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.onebit_adam.callback import OneBitAdam

RANKS = 8
VALUES = np.random.default_rng(0).normal(size=(RANKS, 6)).astype(np.float32)


def floats(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in floats(each)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def one_by_one(make: Any) -> Iterator[dict[str, Any]]:
    """Yield each rank's state, and fail if a floating-point tensor of one before is still there."""
    alive: list[weakref.ref[Tensor]] = []
    for rank in range(RANKS):
        assert [ref for ref in alive if ref() is not None] == []
        alive += map(weakref.ref, floats(state := make(rank)))
        yield state
        del state


def mean(values: np.ndarray) -> list[float]:
    """Sum in the order of the ranks."""
    total = np.zeros(values.shape[1:], np.float32)
    for value in values:
        total += value
    return (total / np.float32(len(values))).tolist()


@pytest.mark.parametrize(
    ("callback", "keys"), [(GradCompress("topk"), ["residual"]), (OneBitAdam(), ["worker", "server"])]
)
def test_residuals_become_the_mean_over_the_ranks_that_had_them(callback: Callback, keys: list[str]):
    """Rank 0 has the first half of `w`, ranks from 4 on all of it, the others nothing."""

    def state(rank: int) -> dict[str, Any]:
        own = {0: {"0:3": torch.tensor(VALUES[0, :3])}, **{r: {"0:6": torch.tensor(VALUES[r])} for r in range(4, 8)}}
        return {key: {"gradients": {"w": own[rank]}} if rank in own else {} for key in keys}

    merged = callback.merge_rank_states(one_by_one(state))
    first, second = mean(VALUES[[0, 4, 5, 6, 7], :3]), mean(VALUES[4:, 3:])
    assert merged.keys() == set(keys)
    for key in keys:
        assert list(merged[key]["gradients"]["w"]) == ["0:6"]
        assert merged[key]["gradients"]["w"]["0:6"].tolist() == first + second


def test_residuals_that_no_rank_had_stay_none():
    assert OneBitAdam().merge_rank_states(one_by_one(lambda _: {"worker": {}, "server": {}})) == {
        "worker": {},
        "server": {},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_become_the_mean_and_all_else_the_first_ranks(dtype: torch.dtype):
    """Two names of one tensor, as tied weights have, are summed once each."""

    def state(rank: int) -> dict[str, Any]:
        weight = torch.tensor(VALUES[rank]).to(dtype)
        return {
            "model": {"a": weight, "tied": weight},
            "optimizer": {"a": {"step": torch.tensor(3.0), "count": torch.tensor(rank), "on": True}},
            "kind": f"of {rank}",
        }

    merged = LocalSGD().merge_rank_states(one_by_one(state))
    exact = torch.tensor(VALUES).to(dtype).double().mean(0)
    expected = torch.tensor(mean(VALUES)) if dtype == torch.float32 else exact.to(dtype)
    assert merged["model"]["a"].dtype == dtype
    assert torch.equal(merged["model"]["a"], expected) and torch.equal(merged["model"]["tied"], expected)
    assert (merged["optimizer"]["a"]["step"].item(), merged["optimizer"]["a"]["count"].item()) == (3.0, 0)
    assert (merged["optimizer"]["a"]["on"], merged["kind"]) == (True, "of 0")
