"""EF-signSGD against a naive version on real ranks, its bits by hand and by NumPy, and the bytes that it states."""

import numpy as np
import pytest
import torch
from support.codecs import Job, average, balance
from support.ranks import run_ranks

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import ErrorFeedback
from trainer.comm.codecs.sign import Sign, pack, unpack

WORLD, STEPS = 3, 30
# Elements 3 to 20 of a matrix, all of a vector, a single number, and the end of a longer vector.
PIECES = (((5, 6), 3, 20), ((64,), 0, 64), ((), 0, 1), ((5_000,), 1_000, 5_000))
ENDS = np.cumsum([stop - start for _, start, stop in PIECES])


def values() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.normal(size=(WORLD, STEPS, ENDS[-1])) * rng.uniform(0.1, 10, ENDS[-1])).astype(np.float32)


def test_eight_numbers_by_hand():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, -0.0, 8.0, -8.0])
    payload = Sign().encode(x, Bucket.of([x], 0))
    assert payload.tolist() == [*np.float32(26 / 8).tobytes(), 0b01110101]
    out = torch.ones(8)
    Sign().decode(payload, out, 2.0, Bucket.of([x], 0))
    assert out.tolist() == [7.5, -5.5, 7.5, -5.5, 7.5, 7.5, 7.5, -5.5]


def test_a_piece_that_is_longer_than_a_chunk():
    x = torch.randn(300_003, dtype=torch.float64)
    out = torch.zeros_like(x)
    Sign().decode(Sign().encode(x, Bucket.of([x], 0)), out, 1.0, Bucket.of([x], 0))
    np.testing.assert_allclose(out, x.abs().mean() * x.sign(), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4096, 5003])
def test_bits_are_those_of_numpy(count):
    bits = np.random.default_rng(count).random(count) < 0.5
    packed = pack(torch.tensor(bits))
    np.testing.assert_array_equal(packed.numpy(), np.packbits(bits, bitorder="little"))
    np.testing.assert_array_equal(unpack(packed, count).numpy(), bits)


def naive(given: np.ndarray) -> np.ndarray:
    """(steps, elements)."""
    left, means = np.zeros((WORLD, ENDS[-1])), []
    for step in range(STEPS):
        sent = []
        for rank in range(WORLD):
            x = left[rank] + given[rank, step]
            parts = [np.abs(part).mean() * np.where(part >= 0, 1, -1) for part in np.split(x, ENDS[:-1])]
            sent.append(np.concatenate(parts))
            left[rank] = x - sent[-1]
        means.append(np.mean(sent, axis=0))
    return np.stack(means)


def test_the_naive_version_on_ranks():
    x = values()
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    ranks = run_ranks(WORLD, average, [Job(ErrorFeedback(Sign()), x, PIECES, kind) for kind in kinds])
    for n, precision in enumerate((1e-6, 1e-6, 2e-2)):
        given = torch.tensor(x).to(kinds[n]).double().numpy()
        assert np.abs(balance([rank[n] for rank in ranks], given)).max() < precision * STEPS * np.abs(x).max()
    expected = naive(x)
    for n in (0, 1):  # a number within rounding of 0 may have the other sign
        off = np.abs(ranks[0][n].means - expected) > 1e-4 * np.abs(expected)
        assert off.sum() < 1e-5 * off.size
    assert np.abs(ranks[0][0].residual).max() > 1
    bytes = (WORLD - 1) * (ENDS[-1] / 8 + 4 * len(PIECES))
    assert [rank[0].bytes for rank in ranks] == pytest.approx([bytes] * WORLD, rel=0.01)


def test_what_is_not_finite_stays_so_and_stays_in_its_piece():
    jobs = []
    for poison in (np.inf, -np.inf, np.nan):
        x = values()[:, :1]
        x[1, 0, 20] = poison
        jobs.append(Job(Sign(), x, PIECES))
    for results in run_ranks(WORLD, average, jobs):
        for done in results:
            assert not np.isfinite(done.means[0, ENDS[0] : ENDS[1]]).any()
            assert np.isfinite(done.means[0, : ENDS[0]]).all() and np.isfinite(done.means[0, ENDS[1] :]).all()
