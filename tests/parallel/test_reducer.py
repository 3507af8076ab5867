"""Buckets that are sent while a step's last gradients are still to come."""

import pytest
import torch
from torch import Tensor, nn

from trainer.comm.bucket import Bucket
from trainer.errors import ConfigError
from trainer.parallel import reducer
from trainer.parallel.reducer import Reducer, cut_buckets

CPU = torch.device("cpu")


def halves(flat: Tensor, bucket: Bucket) -> Tensor:
    return flat / 2


@pytest.fixture
def layers(monkeypatch) -> list[nn.Parameter]:
    """Each in a bucket of its own."""
    monkeypatch.setattr(reducer, "BUCKET_BYTES", 16)
    return [nn.Parameter(torch.full((4,), float(i + 1))) for i in range(3)]


def value(layers: list[nn.Parameter]) -> Tensor:
    x = torch.ones(4)
    for p in layers:
        x = x * p
    return x.sum()


def test_a_bucket_is_sent_when_its_last_gradient_arrives(layers):
    made = Reducer(layers, [2, 2, 2], halves, ["a", "b", "c"], CPU)
    assert made.buckets == [[2], [1], [0]]
    for _ in range(2):  # of two steps
        value(layers).backward()
        assert not made.sent
        order: list[tuple[int, int]] = []
        for i, p in enumerate(layers):
            p.register_hook(lambda grad, i=i, order=order: order.append((i, len(made.sent))))
        value(layers).backward()
        assert order == [(2, 0), (1, 1), (0, 2)]  # before its own arrives, those after it are on their way
        assert len(made.sent) == 3
        made.finish()
        for i, p in enumerate(layers):
            assert p.grad is not None and torch.equal(p.grad, torch.full((4,), 6 / (i + 1)))
            p.grad, p._backward_hooks = None, None
    made.close()
    value(layers).backward()
    assert not made.sent


def test_what_no_hook_has_seen_is_sent_at_the_end(layers):
    """Every parameter is, since another replica may have a gradient where this one has none."""
    sent: list[int] = []
    made = Reducer(layers, [1, 1, 1], lambda flat, bucket: (sent.append(len(flat)), flat / 2)[1], ["a", "b", "c"], CPU)
    layers[0].grad = torch.full((4,), 8.0)
    (layers[1] * 2).sum().backward()
    assert not made.sent  # buckets go in order, and the first one's gradient is missing
    made.finish()
    assert sent == [4, 4, 4] and layers[2].grad is not None and not layers[2].grad.any()
    assert layers[0].grad is not None and layers[1].grad is not None
    assert layers[0].grad.tolist() == [4.0] * 4 and layers[1].grad.tolist() == [1.0] * 4


def test_a_gradient_too_many_takes_no_others_place(layers, monkeypatch):
    monkeypatch.setattr(reducer, "BUCKET_BYTES", 100)
    made = Reducer(layers, [2, 2, 2], halves, ["a", "b", "c"], CPU)
    value(layers).backward()
    layers[0].sum().backward()
    with pytest.raises(ConfigError, match="pipeline: a has two gradients"):
        layers[0].sum().backward()
    assert made.buckets == [[2, 1, 0]] and not made.sent


def test_a_gradient_that_comes_too_late_is_an_error(layers):
    made = Reducer(layers, [1, 1, 1], halves, ["a", "b", "c"], CPU)
    value(layers).backward()
    with pytest.raises(ConfigError, match="pipeline: c has two gradients in one backward pass"):
        value(layers).backward()
    made.close()


def test_a_failed_reduction_is_raised(layers):
    def fails(flat: Tensor, bucket: Bucket) -> Tensor:
        raise ValueError("on purpose")

    made = Reducer(layers, [1, 1, 1], fails, ["a", "b", "c"], CPU)
    value(layers).backward()
    with pytest.raises(ValueError, match="on purpose"):
        made.finish()


def test_without_replicas_gradients_stay(layers):
    made = Reducer(layers, [1, 1, 1], None, ["a", "b", "c"], CPU)
    value(layers).backward()
    made.finish()
    assert not layers[0]._post_accumulate_grad_hooks
    assert layers[0].grad is not None and layers[0].grad.tolist() == [6.0] * 4


def test_buckets_have_one_dtype_and_a_size():
    kinds = (torch.float32, torch.float32, torch.float64, torch.float32)
    tensors = [torch.zeros(4, dtype=kind) for kind in kinds]
    assert cut_buckets(tensors, 32) == [[3], [2], [1, 0]]
    assert cut_buckets(tensors[:2], 31) == [[1], [0]]
    assert cut_buckets([torch.zeros(100), torch.zeros(1)], 8) == [[1], [0]]
