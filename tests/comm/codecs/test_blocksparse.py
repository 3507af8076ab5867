"""The mean of sparse gradients on real ranks: exact, and with the bytes of its non-zero blocks."""

import numpy as np
import pytest
import torch
from support.codecs import Job, average
from support.messages import refuses
from support.ranks import run_ranks

from trainer.comm.codecs.base import ErrorFeedback
from trainer.comm.codecs.blocksparse import BlockSparse

WORLD, BLOCK = 3, 4


def sparse(size: int, block: int, share: float) -> np.ndarray:
    """Of each rank, its own blocks are not zero."""
    rng = np.random.default_rng(size)
    keep = np.repeat(rng.random((WORLD, -(-size // block))) < share, block, axis=1)[:, :size]
    return np.where(keep, rng.normal(size=(WORLD, size)), 0.0).astype(np.float32)[:, None]


def test_eight_numbers_by_hand():
    """Blocks of 2: all zero, a number on one rank only, -0.0 and a pair that cancels, all numbers."""
    x = np.array([
        [0, 0, 3, 0, -0.0, 1, 1, 2],
        [0, 0, 0, 0, 0, -1, 3, 4],
        [-0.0, 0, 0, 0, -0.0, 0, 5, 6],
    ], dtype=np.float32)[:, None]  # fmt: skip
    for (done,) in run_ranks(WORLD, average, [Job(BlockSparse(2), x)]):
        np.testing.assert_allclose(done.means[0], [0, 0, 1, 0, 0, 0, 3, 4], rtol=1e-6, atol=1e-7)
        assert not np.signbit(done.means[0, :2]).any()
        assert done.bytes == (WORLD - 1) * 1 + 2 * (WORLD - 1) / WORLD * 6 * 4


CASES = {
    "few": (sparse(1001, BLOCK, 0.05), torch.float32),
    "double": (sparse(1001, BLOCK, 0.05), torch.float64),
    "half": (sparse(1001, BLOCK, 0.05), torch.bfloat16),
    "shorter than a block": (sparse(3, BLOCK, 1.0), torch.float32),
    "nothing": (sparse(1000, BLOCK, 0.0), torch.float32),
    "all": (sparse(1000, BLOCK, 1.0), torch.float32),
}


def test_the_mean_is_the_mean_and_nothing_is_kept():
    jobs = [Job(ErrorFeedback(BlockSparse(BLOCK)), x, dtype=dtype) for x, dtype in CASES.values()]
    for results in run_ranks(WORLD, average, jobs):
        for done, (x, dtype) in zip(results, CASES.values(), strict=True):
            given = torch.tensor(x).to(dtype).double().numpy()
            atol = 4 * torch.finfo(dtype).eps * np.abs(given).max()
            np.testing.assert_allclose(done.means, given.mean(0), rtol=0, atol=atol)
            assert not done.residual.any()


def test_the_bytes_are_those_of_the_union_of_blocks():
    size, block = 256_000, 64
    x = sparse(size, block, 0.05)
    sent = np.abs(x).max(0).reshape(-1, block).any(1).sum()
    dense = sparse(size, block, 1.0)
    for done, full in run_ranks(WORLD, average, [Job(BlockSparse(block), x), Job(BlockSparse(block), dense)]):
        masks = (WORLD - 1) * size / block / 8
        assert done.bytes == pytest.approx(masks + 2 * (WORLD - 1) / WORLD * 4 * block * sent, rel=0.01)
        assert full.bytes == pytest.approx(masks + 2 * (WORLD - 1) / WORLD * 4 * size, rel=0.01)


def test_what_is_not_finite_stays_so():
    jobs = []
    for poison in (np.inf, -np.inf, np.nan):
        x = sparse(100, BLOCK, 0.1)
        x[1, 0, 9] = poison
        jobs.append(Job(BlockSparse(BLOCK), x))
    for results in run_ranks(WORLD, average, jobs):
        for done in results:
            assert not np.isfinite(done.means[0, 9]) and np.isfinite(np.delete(done.means[0], 9)).all()


def test_knob():
    with refuses("codec.block=0", "1"):
        BlockSparse(0)
