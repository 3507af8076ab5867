"""int8 against a naive version on real ranks; the bounds, the noise and the bytes that it states."""

import numpy as np
import pytest
import torch
from support.codecs import Job, average, balance
from support.quick import quick
from support.ranks import run_ranks

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import ErrorFeedback
from trainer.comm.codecs.int8 import Int8, dequantise, quantise
from trainer.errors import ConfigError

WORLD = 3


def values(steps: int, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(WORLD, steps, size)) * 10 ** rng.uniform(-3, 3, size)).astype(np.float32)


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """To the nearest multiple of a 127th of the largest of each block."""
    blocks = np.pad(x, (0, -len(x) % block)).reshape(-1, block).astype(float)
    step = np.abs(blocks).max(1, keepdims=True) / 127 * (1 + 2**-20)
    return (np.floor(blocks / np.where(step > 0, step, 1) + 0.5) * step).reshape(-1)[: len(x)]


def test_eight_numbers_by_hand():
    records = torch.empty(2, 8, dtype=torch.uint8)
    quantise(torch.tensor([[127.0, 1.0, -2.4, 0.6], [0.0, -0.0, 0.0, 0.0]]), records, None)
    assert records[:, 4:].view(torch.int8).tolist() == [[127, 1, -2, 1], [0, 0, 0, 0]]
    expected = torch.tensor([[127.0, 1.0, -2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(dequantise(records), expected, rtol=1e-6, atol=0)


def test_nearest_is_the_naive_version_of_it():
    sizes, block = (1000, 5, 12, 140_003), 8
    given = {size: values(2, size) for size in sizes}
    jobs = [Job(Int8("nearest", block), given[size]) for size in sizes]
    for results in run_ranks(WORLD, average, jobs):
        for done, size in zip(results, sizes, strict=True):
            for step in range(2):
                sent = np.mean([rounded(rank[step], block) for rank in given[size]], axis=0)
                # float32 may take a number that is half a step from two codes to the other one.
                far = np.abs(done.means[step] - rounded(sent, block)) > 1e-5 * np.abs(given[size]).max(0).max(0)
                assert far.sum() <= size * 1e-4


@pytest.mark.parametrize(("rounding", "bound"), quick([("nearest", 0.5), ("stochastic", 1.0)]))
def test_bound_bytes_and_the_sum_with_error_feedback(rounding, bound):
    block, steps = 64, 30
    x, long = values(steps, 5000), values(1, 140_003)
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    jobs = [Job(ErrorFeedback(Int8(rounding, block)), x, dtype=kind) for kind in kinds]
    ranks = run_ranks(WORLD, average, [*jobs, Job(Int8(rounding, block), long)])
    for n, precision in enumerate((1e-6, 1e-6, 2e-2)):
        given = torch.tensor(x).to(kinds[n]).double().numpy()
        assert np.abs(balance([rank[n] for rank in ranks], given)).max() < precision * steps * np.abs(x).max()
        assert all(np.array_equal(rank[n].means, ranks[0][n].means) for rank in ranks)
    plain = ranks[0][-1]
    assert plain.bytes == pytest.approx(2 * (WORLD - 1) / WORLD * long.shape[2] * (1 + 4 / block), rel=0.01)
    tops = np.abs(np.pad(long[:, 0], ((0, 0), (0, -long.shape[2] % block))).reshape(WORLD, -1, block)).max(2) / 127
    step = np.repeat(2 * tops.mean(0), block)[: long.shape[2]]  # of the ranks, and no more of their mean
    error = np.abs(plain.means[0] - long[:, 0].astype(float).mean(0)) / step
    assert 0.8 * bound * 0.5 < error.max() <= bound * (1 + 1e-3)


def encoded(codec: Int8, step: int, x: torch.Tensor) -> torch.Tensor:
    records = torch.empty(len(x), 4 + x.shape[1], dtype=torch.uint8)
    quantise(x, records, codec.generator(x.device, Bucket.of([x], step)))
    return records


def test_stochastic_rounding_is_unbiased():
    x = torch.linspace(-1, 1, 64)[None]
    codec, draws = Int8(block=64), 4000
    mean = torch.stack([dequantise(encoded(codec, step, x)) for step in range(draws)]).double().mean(0)
    assert (mean - x).abs().max() < 5 * 0.5 / 127 / draws**0.5
    assert (dequantise(encoded(codec, 0, x)) - x).abs().max() > 0.5 / 127


def test_noise_depends_on_seed_step_and_rank_and_on_nothing_else():
    x = torch.randn(4, 256)
    bits = {}
    for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        codec = Int8()
        codec.join(2, key[0], key[1])
        before = torch.get_rng_state()
        bits[key] = encoded(codec, key[2], x)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(1)
        assert torch.equal(encoded(codec, key[2], x), bits[key])
    assert len({tuple(value.view(-1).tolist()) for value in bits.values()}) == 4


def test_what_is_not_finite_stays_so_and_stays_in_its_block():
    jobs = []
    for poison in (np.inf, -np.inf, np.nan):
        x = values(1, 50)
        x[1, 0, 9] = poison
        jobs.append(Job(Int8(block=8), x))
    for results in run_ranks(WORLD, average, jobs):
        for done in results:
            assert not np.isfinite(done.means[0, 8:16]).any()
            assert np.isfinite(np.delete(done.means[0], range(8, 16))).all()


@pytest.mark.parametrize("block", [0, 6])
def test_blocks_hold_whole_words(block):
    with pytest.raises(ConfigError, match=rf"^codec\.block={block}: .*multiple of 4"):
        Int8(block=block)
