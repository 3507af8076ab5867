"""The elements of largest magnitude against a full sort, odd input, and the passes it takes to find and send them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.gradients import Alone, bucket, heavy_tailed, mostly_zero, normal, sent
from support.quick import quick
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.comm.codecs import sparse
from trainer.comm.codecs.base import ErrorFeedback
from trainer.comm.codecs.dgc import DGC
from trainer.comm.codecs.topk import TopK
from trainer.errors import ConfigError


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def in_columns(n: int) -> Tensor:
    """A matrix of 768 columns, two of which have all that is large."""
    flat = normal(n)
    flat.view(-1, 768)[:, [5, 700]] *= 100
    return flat


def in_one_place(n: int) -> Tensor:
    flat = normal(n)
    flat[-n // 50 :] *= 1000
    return flat


@pytest.mark.parametrize("where", [sparse.reaching_cpu, sparse.reaching])
@pytest.mark.parametrize("density", quick([0.01, 0.001, 0.25], 2))
@pytest.mark.parametrize("make", [normal, heavy_tailed, mostly_zero, in_columns, in_one_place])
def test_what_a_full_sort_selects(make, density, where, monkeypatch):
    """Both ways to find indices: the one for GPUs is plain torch, too. A threshold that is too high would send less."""
    monkeypatch.setattr(sparse, "reaching_cpu", where)
    flat = make(768 * 400)
    k = math.ceil(density * len(flat))
    expected = set(torch.argsort(flat.abs(), descending=True)[:k].tolist())
    nonzero = int(flat.count_nonzero())
    for step in (0, 5):
        values, indices = TopK(density).select(flat, bucket(flat, step))
        assert len(values) == len(indices) == k and torch.equal(indices, indices.sort().values)
        found = set(indices[values != 0].tolist())
        if nonzero < k:  # then all of them go
            assert found == set(flat.nonzero().view(-1).tolist())
        else:
            assert len(found & expected) >= 0.95 * k
            assert flat.abs()[list(found)].sum() >= 0.999 * flat.abs()[list(expected)].sum()
        assert torch.equal(flat[list(found)].bfloat16().float(), sent(TopK(density), flat, step)[list(found)])
        assert torch.equal(flat[list(found)], sent(DGC(density), flat, step)[list(found)])


def test_few_are_looked_at():
    """Slightly more than k reach the threshold, else finding the largest among them is a sort again."""
    for make in (normal, heavy_tailed, in_columns, in_one_place):
        bits = make(768 * 400).view(torch.int32)
        for density, most in ((0.01, 1.5), (0.001, 2.5), (0.25, 1.1)):
            k = int(density * len(bits))
            for step in range(5):
                threshold, room = sparse.estimate(bits, k, step)
                assert 1.0 <= len(sparse.reaching_cpu(bits, threshold, room)) / k <= most


@pytest.mark.parametrize("where", [sparse.reaching_cpu, sparse.reaching])
@pytest.mark.parametrize("n", [1, 3, 1000, 300_000])
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_odd_input(n, density, where, monkeypatch):
    monkeypatch.setattr(sparse, "reaching_cpu", where)
    codec, k = TopK(density), math.ceil(density * n)
    zeros, same, lonely = torch.zeros(n), torch.full((n,), -2.0), torch.zeros(n)
    lonely[n // 2] = 2.0**-133  # the smallest bfloat16
    for flat, count in ((zeros, 0), (same, k), (lonely, 1)):
        assert codec.encode(flat, bucket(flat)).nbytes == 4 * math.ceil(n / 65536) + 4 * k
        decoded = sent(codec, flat)
        assert decoded.count_nonzero() == count
        assert torch.equal(decoded[decoded != 0], flat[decoded != 0].bfloat16().float())


@pytest.mark.parametrize("codec", [TopK(), DGC()])
@pytest.mark.parametrize("n", [5, 65_535, 65_536, 65_537, 400_000])
def test_indices_of_16_bits(codec, n):
    """The first and the last element of each block, an odd number of them, in a row as a gather gives it."""
    indices = torch.tensor(sorted({*range(0, n, 65_536), *range(65_535, n, 65_536), n - 1, n // 2}))
    for count in (len(indices), len(indices) - 1):
        values = torch.arange(1.0, count + 1)
        payload = codec.pack(values, indices[:count], n)
        found, where = codec.unpack(torch.stack([payload, payload])[1], n)
        assert torch.equal(found.float(), values) and torch.equal(where.long(), indices[:count])


def test_padding_does_not_touch_what_was_not_sent():
    """Where fewer than k reach the threshold: here it is forced to be too high."""
    codec, flat = ErrorFeedback(TopK(0.5)), torch.tensor([1.0, 8.0, 2.0, 3.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "estimate", lambda *_: (torch.tensor(5.0).view(torch.int32), 4))
        holds = bucket(flat)
        codec.mean(flat, flat, holds, Alone())
    assert flat.tolist() == [0, 8, 0, 0]
    assert codec.kept["residual"].of(holds, flat).tolist() == [1, 0, 2, 3]


class Passes(TorchDispatchMode):
    """Elements that operations walk, each counted by the larger of what it reads and what it writes: an addition of n
    elements to n others is n. What is indexed counts by its indices; a view is free."""

    indexed = (
        torch.ops.aten.index_select.default,
        torch.ops.aten.index_add_.default,
        torch.ops.aten.index_fill_.int_Scalar,
    )

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.indexed:
            self.elements += args[2].numel()
        elif not func.is_view:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.elements += max((leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), default=0)
        return result

    def __getattr__(self, name: str) -> Any:
        """In the place of numpy: the dispatcher does not see its functions."""
        function = getattr(np, name)

        def counted(first: Any, *args: Any) -> Any:
            result = function(first, *args)
            self.elements += max(array.size for array in (result, first) if isinstance(array, np.ndarray))
            return result

        return counted


class Noted(Alone):
    def __init__(self, passes: Passes) -> None:
        super().__init__(2)
        self.passes = passes

    def gather(self, own: Tensor) -> Tensor:
        self.before = self.passes.elements
        return super().gather(own)


@pytest.mark.parametrize("where", [sparse.reaching_cpu, sparse.reaching])
@pytest.mark.parametrize("codec", [lambda: ErrorFeedback(TopK()), lambda: DGC(momentum=0.9)], ids=["topk", "dgc"])
def test_six_passes(codec, where, monkeypatch):
    """Until the payload goes and what was not sent is kept, residual and momentum included; and one for the mean."""
    monkeypatch.setattr(sparse, "reaching_cpu", where)
    made, flat, passes = codec(), normal(1_000_000), Passes()
    holds, reduce = bucket(flat), Noted(passes)
    made.mean(flat, flat, holds, reduce)  # the first makes what it keeps
    flat.copy_(normal(1_000_000))
    monkeypatch.setattr(sparse, "np", passes)
    passes.elements = 0
    with passes:
        made.mean(flat, flat, holds, reduce)
    assert 3 * len(flat) < reduce.before <= 6 * len(flat)
    assert len(flat) <= passes.elements - reduce.before <= 1.2 * len(flat)


@pytest.mark.parametrize("density", [0.01, 0.1])
@pytest.mark.parametrize("n", [68, 1000, 65536, 200_001])
def test_bytes_are_those_of_the_card(n, density):
    flat, k = normal(n), math.ceil(density * n)
    for codec, each in ((TopK(density), 4), (DGC(density, warmup_steps=0), 6)):
        payload = codec.encode(flat, bucket(flat, 0))
        assert payload.nbytes == math.ceil((each * k + 4 * math.ceil(n / 65536)) / 4) * 4


@pytest.mark.parametrize("density", [0.0, -1.0, 1.5, float("nan")])
def test_density(density):
    with pytest.raises(ConfigError, match=r"^codec\.density="):
        TopK(density)
