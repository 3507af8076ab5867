"""The order in which buckets are sent."""

import random
from types import SimpleNamespace

import torch
from torch import nn

from trainer.callbacks.overlap.send_order import Record, send_order
from trainer.comm.bucket import Bucket


def test_what_is_needed_first_goes_next():
    """By hand. Backward has the last layers' gradients first; the next forward pass needs them last."""
    ready, need = [0.0, 1.0, 2.0, 3.0], [30.0, 20.0, 10.0, 0.0]
    assert send_order(ready, need, [0.5] * 4) == [0, 1, 2, 3]  # the link is free whenever one is ready
    assert send_order(ready, need, [1.6] * 4) == [0, 1, 3, 2]  # at 3.2 the last one, needed first, is ready
    assert send_order(ready, need, [9.0] * 4) == [0, 3, 2, 1]
    assert send_order([0.0] * 3, [2.0, 0.0, 1.0], [1.0] * 3) == [1, 2, 0]
    assert send_order([0.0, 0.0], [1.0, 1.0], [1.0, 1.0]) == [0, 1]


def test_every_bucket_is_sent_once_and_never_is_the_link_idle_beside_a_ready_one():
    random.seed(0)
    for _ in range(50):
        ready, need, send = ([random.random() for _ in range(12)] for _ in range(3))
        order = send_order(ready, need, send)
        assert sorted(order) == list(range(12))
        now = 0.0
        for place, chosen in enumerate(order):
            start = max(now, ready[chosen])
            others = order[place + 1 :]
            assert not [i for i in others if ready[i] < start and ready[chosen] > max(now, ready[i])]
            assert not [i for i in others if ready[i] <= start == now and need[i] < need[chosen]]
            now = start + send[chosen]


def test_the_pass_with_the_shortest_backward_counts(monkeypatch):
    """The second of three; and the shortest time that a reduction of a size took."""
    clock, seconds = [0.0], iter([1.0, 5.0, 7.0, 2.0, 3.0, 4.0, 1.0, 5.0, 7.0])  # two layers' backward, a reduction
    monkeypatch.setattr("trainer.callbacks.overlap.send_order.time", SimpleNamespace(monotonic=lambda: clock[0]))
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    record = Record(module, list(module.parameters()))

    def work(*_: object) -> None:
        clock[0] += next(seconds)

    for layer in module:
        layer.register_full_backward_pre_hook(work)
    reduce = record.timed(lambda flat, bucket: (work(), flat)[1])
    for _ in range(3):
        module(torch.ones(1, 2, requires_grad=True)).sum().backward()
        reduce(torch.ones(4), Bucket([], 0))
    module(torch.ones(1, 2))  # without a backward, as somebody's check
    record.end()
    assert sorted(set(record.ready_s.values())) == [13 + 2, 13 + 2 + 3]
    assert set(record.called_s.values()) == {13}
    assert record.send_s == {4: 4.0}
