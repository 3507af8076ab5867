"""Residuals: kept by parameter, whatever buckets are cut, and a part that other ranks have is an error."""

from copy import deepcopy

import pytest
import torch
from support.gradients import Alone
from support.messages import refuses
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec, ErrorFeedback, Residuals, merge

A, B, C = (torch.zeros(size) for size in (4, 3, 5))
NAMES = {A: "a", B: "b", C: "c"}


def numbered(bucket: Bucket, like: Tensor) -> Residuals:
    residuals = Residuals()
    residuals.of(bucket, like).copy_(torch.arange(1.0, len(like) + 1))
    return residuals


def test_other_buckets_find_what_was_kept_of_each_parameter():
    saved = numbered(Bucket.of([A, B, C], 0), torch.zeros(12)).state(NAMES)
    restored = Residuals()
    restored.load(deepcopy(saved), NAMES)
    assert restored.of(Bucket.of([C, A], 0), torch.zeros(9)).tolist() == [8, 9, 10, 11, 12, 1, 2, 3, 4]
    left = restored.state(NAMES)["gradients"]  # b, for which no bucket has asked yet, is saved again
    assert {name: [values.tolist() for values in parts.values()] for name, parts in left.items()} == {
        "a": [[1, 2, 3, 4]], "b": [[5, 6, 7]], "c": [[8, 9, 10, 11, 12]],
    }  # fmt: skip
    cut = Bucket.of([A, B], 0).cut(2, 6)
    part = Residuals()
    part.load(saved, NAMES)
    assert part.of(cut, torch.zeros(4)).tolist() == [3, 4, 5, 6]
    assert part.of(cut, torch.zeros(4)).tolist() == [3, 4, 5, 6]  # what is taken is no longer restored, and stays
    assert part.state(NAMES)["gradients"].keys() == {"a", "b", "c"}


def test_gradients_and_weights_are_never_mixed():
    residuals = numbered(Bucket.of([A], 0), torch.zeros(4))
    assert residuals.of(Bucket.of([A], 7, "weights"), torch.zeros(4)).tolist() == [0, 0, 0, 0]
    assert residuals.of(Bucket.of([A], 7), torch.zeros(4)).tolist() == [1, 2, 3, 4]


def test_a_part_that_is_on_other_ranks_is_refused():
    half = numbered(Bucket.of([A], 0).cut(0, 2), torch.zeros(2)).state(NAMES)
    restored = Residuals()
    restored.load(half, NAMES)
    with refuses("trainer.resume", "callbacks.hierarchical"):
        restored.take(Bucket.of([A], 0))
    restored.take(Bucket.of([A], 0, "weights"))  # has nothing restored


def test_the_mean_is_over_the_ranks_that_had_an_element():
    first = numbered(Bucket.of([A], 0), torch.zeros(4)).state(NAMES)
    second = numbered(Bucket.of([A], 0).cut(2, 4), torch.zeros(2)).state(NAMES)
    merged = merge([{"residual": first}, {"residual": second}])["residual"]
    assert merged["gradients"]["a"]["0:4"].tolist() == [1, 2, (3 + 1) / 2, (4 + 2) / 2]
    assert merge([]) == {}


class Whole(Codec):
    """Sends all elements above 1, as they are."""

    gathers = True

    def encode(self, flat: Tensor, bucket: Bucket) -> Tensor:
        return torch.where(flat > 1, flat, 0.0)

    def decode(self, payload: Tensor, out: Tensor, weight: float, bucket: Bucket) -> None:
        out.add_(payload, alpha=weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_sent_is_added_to_the_next_step(dtype):
    """In float32 at least: 256 times 2^-8 is 1, and bfloat16 would stay at its half."""
    codec, bucket = ErrorFeedback(Whole()), Bucket.of([B], 0)
    out = torch.zeros(3, dtype=dtype)
    for _ in range(257):
        flat = torch.tensor([2.0**-8, 3.0, 0.0], dtype=dtype)
        codec.mean(flat, out := torch.empty(3, dtype=dtype), bucket, Alone(2))
    assert out.tolist() == torch.tensor([257 / 256, 3.0, 0.0], dtype=dtype).tolist()
    assert codec.residual.of(bucket, out).tolist() == [0.0, 0.0, 0.0]
    codec.mean(torch.ones(3, dtype=dtype), torch.empty(3, dtype=dtype), bucket, Alone(2))
    assert codec.residual.of(bucket, out).tolist() == [1.0, 1.0, 1.0]
    codec.forget()
    assert codec.residual.of(bucket, out).tolist() == [0.0, 0.0, 0.0]


def test_memory_of_a_payload_is_used_again():
    codec = Codec()
    first = codec.buffer(torch.zeros(4), torch.half)
    assert codec.buffer(torch.zeros(2, 2), torch.half) is first and first.dtype == torch.half
    assert codec.buffer(torch.zeros(4), torch.bfloat16) is not first
