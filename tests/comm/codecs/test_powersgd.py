"""PowerSGD against torch's hook on real ranks, by hand, and across a checkpoint."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.codecs import Job, average, balance
from support.messages import refuses
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer.callbacks.grad_compress import GradCompress
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import ErrorFeedback
from trainer.comm.codecs.powersgd import PowerSGD
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.config.options import Options
from trainer.parallel import ddp
from trainer.process.environment import Place

WORLD, STEPS, START = 3, 20, 2


def alone(flat: Tensor, bucket: Bucket) -> Tensor:
    return flat


class Reduced:
    """What torch's hook takes for the work of an all-reduce. Real work would now and then crash the process: it leaves
    the last reference to the group to a thread of the group's own, which can't wait for its own end."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        group.allreduce([tensor]).wait()
        self.tensor = tensor

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        done = torch.futures.Future()
        done.set_result([self.tensor])
        return done


def train(place: Place, rank: int, ours: bool) -> list[np.ndarray]:
    """Weights after 20 steps of a network in float64, in one bucket."""
    ranks, here = Ranks(place, "cpu", "gloo", 60.0), SimpleNamespace(step=0)
    torch.manual_seed(0)
    layers = nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 3)
    module = nn.Sequential(*layers).double()
    group, codec = ranks.new_group(), PowerSGD(rank)
    end, with_feedback = AllReduce(group), ErrorFeedback(codec)
    state = PowerSGDState(group, rank, START, min_compression_rate=1)

    def reduce(flat: Tensor, bucket: Bucket) -> Tensor:
        if bucket.step < START:
            return end(flat, bucket)
        with_feedback.mean(flat, flat, bucket, end)
        return flat

    def torchs(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if here.step == START:  # from our Q, in its own layout
            matrices = [p for p in bucket.parameters() if codec.compresses(p)]
            state.q_memory_dict[0] = torch.cat([codec.q(p, p).t().reshape(-1) for p in matrices])
            state.p_memory_dict[0] = torch.empty(sum(rank * p.shape[0] for p in matrices), dtype=torch.float64)
        with mock.patch.object(dist, "all_reduce", Reduced):
            return powerSGD_hook(state, bucket)

    if ours:
        model = ddp.DDP(module, place.rank, place.world, torch.device("cpu"), {}, reduce, lambda: here.step).model
    else:
        model = DDP(module)
        model.register_comm_hook(None, torchs)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(place.rank)
    for here.step in range(STEPS):
        x = torch.randn(16, 32, generator=generator, dtype=torch.float64)
        (model(x) - x[:, :3].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model
    ranks.close()
    return [p.detach().numpy() for p in module.parameters()]


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_steps_are_those_of_torchs_hook(rank):
    ours, torchs = run_ranks(WORLD, train, rank, True), run_ranks(WORLD, train, rank, False)
    for mine, theirs in zip(ours, torchs, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def once(codec: PowerSGD, param: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and what is left."""
    flat = matrix.reshape(-1).clone()
    out = torch.empty_like(flat)
    codec.mean(flat, out, Bucket.of([param], 0), alone)
    return out.view_as(matrix), flat.view_as(matrix)


def test_eight_numbers_by_hand():
    """P = M (1, 1, 0, 0) = (3, 1) / sqrt(10), Q = M^T P = (9, 1, 0, 0) / sqrt(10)."""
    matrix, codec, param = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]), PowerSGD(1), torch.empty(2, 4)
    codec.shared["q"][param] = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    mean, left = once(codec, param, matrix)
    expected = torch.tensor([[2.7, 0.3, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0]])
    torch.testing.assert_close(mean, expected)
    torch.testing.assert_close(left, matrix - expected)
    torch.testing.assert_close(codec.shared["q"][param].abs(), torch.tensor([[9.0, 1.0, 0.0, 0.0]]) / 10**0.5)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_rank_1_is_recovered_at_once(rank):
    """Also as a convolution's weight, where more columns than it has leave nothing to make them of."""
    matrix = torch.outer(torch.arange(1.0, 13.0), torch.linspace(-1, 2, 20)).view(12, 4, 5)
    mean, left = once(PowerSGD(rank), torch.empty(12, 4, 5), matrix)
    torch.testing.assert_close(mean, matrix, rtol=1e-5, atol=1e-5)
    assert left.abs().max() < 1e-4


def test_zeros_and_what_is_not_finite_do_not_last():
    codec, param, matrix = PowerSGD(1), torch.empty(6, 9), torch.zeros(6, 9)
    mean, left = once(codec, param, matrix)
    assert not mean.any() and not left.any()
    for poison in (float("inf"), float("nan")):
        matrix[2, 3] = poison
        assert not once(codec, param, matrix)[0].isfinite().all()
    matrix = torch.outer(torch.arange(6.0), torch.arange(9.0))
    torch.testing.assert_close(once(codec, param, matrix)[0], matrix)


SHAPES = (30, 20), (20,), (4, 10, 10), (7, 2)
WHOLE = tuple((shape, 0, int(np.prod(shape))) for shape in SHAPES)
CUT = (((30, 20), 100, 600), *WHOLE[1:])  # its first matrix is not whole, and goes as it is
RANK = 2


def values(size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(WORLD, 30, size)).astype(np.float32)


def test_bytes_and_the_sum_with_error_feedback():
    kinds, whole, cut = (torch.float32, torch.float64, torch.bfloat16), values(1034), values(934)
    jobs = [Job(ErrorFeedback(PowerSGD(RANK)), whole, WHOLE, kind) for kind in kinds]
    jobs.append(Job(ErrorFeedback(PowerSGD(RANK)), cut, CUT))
    ranks = run_ranks(WORLD, average, [*jobs, Job(ErrorFeedback(PowerSGD(RANK, "bf16")), whole, WHOLE, kinds[1])])
    kinds = *kinds, kinds[0], kinds[1]
    bounds = ((whole, 1e-6), (whole, 1e-13), (whole, 1e-2), (cut, 1e-6), (whole, 1e-3))
    for n, (x, precision) in enumerate(bounds):
        given = torch.tensor(x).to(kinds[n]).double().numpy()
        assert np.abs(balance([rank[n] for rank in ranks], given)).max() < precision * 30 * np.abs(x).max()
        assert all(np.array_equal(rank[n].means, ranks[0][n].means) for rank in ranks)
    # The large matrix and the convolution, the vector and the small matrix.
    numbers = RANK * (30 + 20) + RANK * (4 + 100) + 20 + 14
    assert ranks[0][0].bytes == pytest.approx(2 * (WORLD - 1) / WORLD * 4 * numbers)
    assert ranks[0][3].bytes == pytest.approx(2 * (WORLD - 1) / WORLD * 4 * (500 + numbers - RANK * 50))
    assert ranks[0][4].bytes == ranks[0][0].bytes / 2
    assert np.abs(ranks[0][0].residual[:600]).max() > 1
    np.testing.assert_allclose(ranks[0][0].means[:, 600:620], whole[:, :, 600:620].mean(0), atol=1e-6)
    np.testing.assert_allclose(ranks[0][3].means[:, :500], cut[:, :, :500].mean(0), atol=1e-6)


def chain(module: nn.Module) -> tuple[GradCompress, Any]:
    compress = GradCompress("powersgd", rank=RANK)
    trainer: Any = SimpleNamespace(world=1, rank=0, options=Options(), module=module, rehearsing=False)
    reduce = compress.wrap_reduce(trainer, alone)
    compress.wrap_optimizer(trainer, torch.optim.SGD(module.parameters()))
    return compress, reduce


def test_a_resume_has_the_same_bits_whatever_the_buckets_are():
    module = nn.ParameterDict({str(n): nn.Parameter(torch.empty(shape)) for n, shape in enumerate(SHAPES)})
    params, grads = list(module.values()), torch.tensor(values(1034)[0, :6])
    _, reduce = chain(module)
    expected = [reduce(grad.clone(), Bucket.of(params, step)) for step, grad in enumerate(grads)]
    _, reduce = chain(module)
    for start, stop, bucket in ((600, 1034, params[1:]), (0, 600, params[:1])):
        assert torch.equal(reduce(grads[0, start:stop].clone(), Bucket.of(bucket, 0)), expected[0][start:stop])
    first, reduce = chain(module)
    for step, grad in enumerate(grads[:3]):
        reduce(grad.clone(), Bucket.of(params, step))
    second, reduce = chain(module)
    second.load_state_dict(first.state_dict())
    second.load_rank_state_dict(first.rank_state_dict())
    for step, grad in enumerate(grads[3:], 3):
        parts = [reduce(grad[:600].clone(), Bucket.of(params[:1], step)), grad[600:].clone()]
        reduce(parts[1], Bucket.of(params[1:], step))
        assert torch.equal(torch.cat(parts), expected[step])
    assert first.state_dict()["q"].keys() == {"0", "2"}


def test_what_rounding_takes_away_stays_in_the_residual():
    """Of the second factor and of what is not compressed; the first one is a base that both sides know."""
    codec, matrix = PowerSGD(2, "bf16"), torch.tensor(values(600)[0, 0]).view(30, 20)
    mean, left = once(codec, torch.empty(30, 20), matrix)
    torch.testing.assert_close(mean + left, matrix, rtol=1e-6, atol=1e-6)
    vector = matrix.view(-1)
    mean, left = once(codec, torch.empty(600), vector)
    assert torch.equal(mean, vector.bfloat16().float()) and torch.equal(mean + left, vector) and left.any()


def test_knob():
    with refuses("codec.rank=0", "1"):
        PowerSGD(0)
