"""The top-k codec by hand, the books of its error feedback, and what is not finite."""

import numpy as np
import pytest
import torch
from support.gradients import Alone, bucket, heavy_tailed, mostly_zero, normal

from trainer.comm.codecs.base import ErrorFeedback
from trainer.comm.codecs.topk import TopK


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_by_hand():
    codec, flat = TopK(0.25), torch.tensor([0.5, -3.0, 1.0, 0.0, 2.0, -0.1, 2.5, -1.0])
    payload = codec.encode(flat, bucket(flat))
    assert payload.view(torch.int16).tolist() == [2, 0, -16320, 16416, 1, 6]  # 2 in the first block; 0xC040, 0x4020
    out = torch.full((8,), 10.0)
    codec.decode(payload, out, 0.5, bucket(flat))
    assert out.tolist() == [10, 8.5, 10, 10, 10, 10, 11.25, 10]
    codec.decode(payload, flat, -1.0, bucket(flat))
    assert flat.tolist() == [0.5, 0, 1.0, 0.0, 2.0, np.float32(-0.1), 0, -1.0]


@pytest.mark.parametrize("make", [normal, heavy_tailed, mostly_zero])
def test_the_same_again(make):
    """The same payload for the same gradients; and nothing is drawn from torch's generator, which dropout uses."""
    flat, state = make(300_000), torch.get_rng_state()
    first, again = (TopK().encode(flat.clone(), bucket(flat, 3)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("make", [normal, heavy_tailed])
def test_sent_plus_residual_is_what_was_given(make):
    codec, flat = ErrorFeedback(TopK()), make(100_000)
    given, back = torch.zeros(100_000, dtype=torch.float64), torch.zeros(100_000, dtype=torch.float64)
    holds = bucket(flat)
    for step in range(50):
        gradient = flat.roll(997 * step) * (1 + step % 3)
        holds.step = step
        given += gradient
        codec.mean(gradient, gradient, holds, Alone(3))
        back += gradient
        assert 0.009 * 1e5 < gradient.count_nonzero() <= 0.01 * 1e5
    residual = codec.kept["residual"].of(holds, flat).double()
    assert residual.abs().max() > 0
    bound = 50 * 2.0**-23 * flat.abs().max() * 100
    torch.testing.assert_close(back + residual, given, rtol=0, atol=float(bound))


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_sent_and_does_not_stay(poison):
    """A guard looks for it in the mean, and skips the step: the residual must be good for the next."""
    codec, flat = ErrorFeedback(TopK()), normal(200_000)
    flat[[7, 150_000]] = poison
    holds = bucket(flat)
    codec.mean(flat, flat, holds, Alone(2))
    assert (~flat.isfinite()).nonzero().view(-1).tolist() == [7, 150_000]
    assert codec.kept["residual"].of(holds, flat).isfinite().all()
