"""The order in which buckets are sent."""

import random

from trainer.needs import send_order


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
