"""Fragments against torch's own Nesterov SGD, their division, and means of what differs between ranks."""

import pytest
import torch
from support.messages import refuses
from torch import Tensor, nn

from trainer.callbacks.local_sgd.averaging import Fragment, OuterOptimizer, average_model, mean_of, partition
from trainer.comm.bucket import Bucket
from trainer.comm.reduce import Background


@pytest.mark.parametrize("sizes", [[5], [1, 1, 1, 1], [9, 1, 1, 1], [1, 1, 1, 9], [4, 3, 2, 1, 3, 5]])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_in_order_and_about_as_large(sizes, count):
    params = [torch.zeros(size) for size in sizes]
    parts = partition(params, count)
    assert [id(p) for part in parts for p in part] == [id(p) for p in params]
    assert len(parts) <= count and all(parts)
    assert max(sum(p.numel() for p in part) for part in parts) < sum(sizes) / count + max(sizes)


def halve(drift: Tensor, _: Bucket) -> Tensor:
    """Stands for the mean with a rank that has not moved."""
    return drift / 2


def test_the_common_weights_step_as_torchs_nesterov_does():
    outer = OuterOptimizer.of("nesterov", 0.7, 0.9, 0.25, delay=2)
    background = Background(torch.device("cpu"))
    own, common = torch.randn(2, 3, dtype=torch.float64), nn.Parameter(torch.empty(2, 3, dtype=torch.float64))
    common.data.copy_(own)
    reference = torch.optim.SGD([common], lr=0.7, momentum=0.9, nesterov=True)
    fragment = Fragment([own], outer, halve, background)
    fragment.begin()
    for step in (4, 8, 12):
        own += torch.randn_like(own)
        common.grad = (common.detach() - own) / 2
        fragment.send(step, step + 2)
        before = own.add_(1.0).clone()  # training goes on while the drift is under way
        fragment.land(step + 1)
        assert torch.equal(own, before)
        fragment.land(step + 2)
        reference.step()
        torch.testing.assert_close(own, 0.25 * before + 0.75 * common.detach())
        assert fragment.arrive() == -1
    background.thread.shutdown()


def test_a_mean_that_is_on_its_way_survives_a_resume():
    ends, background = [], Background(torch.device("cpu"))
    start, moved = torch.zeros(4), torch.ones(4)
    for resumed in (False, True):
        own, outer = start.clone(), OuterOptimizer.of("average", None, None, None, delay=3)
        fragment = Fragment([own], outer, halve, background)
        fragment.begin()
        own.copy_(moved)
        fragment.send(5, 8)
        if resumed:
            assert fragment.arrive() == 8
            fragment = Fragment([own], outer, halve, background)  # the common weights are restored with `outer`
            fragment.resume(8)
        fragment.land(8)
        ends.append(own)
    assert torch.equal(*ends) and torch.equal(ends[0], torch.full((4,), 0.75))  # half of 1, and half of its own 1
    background.thread.shutdown()


def test_a_model_is_averaged_with_its_running_statistics():
    """A counter is no number to average: each rank has its own."""
    own, mean = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for tensor in (*own.parameters(), own.running_mean, own.running_var, own.num_batches_tracked):
        tensor.data.fill_(4)
    with torch.no_grad():
        average_model(lambda flat, _: flat / 2, own, mean)
    floats = (*mean.parameters(), mean.running_mean, mean.running_var)
    assert all(torch.equal(tensor, torch.full((3,), 2.0)) for tensor in floats)
    assert mean.num_batches_tracked == 4


def test_states_of_ranks_have_a_mean():
    states = [{"w": {"m": torch.tensor([rank, 2.0])}, "step": torch.tensor(rank), "kind": "Adam"} for rank in (1, 3)]
    mean = mean_of(states)
    assert mean["w"]["m"].tolist() == [2.0, 2.0] and mean["step"] == 1 and mean["kind"] == "Adam"


def test_moments_of_8_bits_have_no_mean():
    """Each rank's values count in scales of its own."""
    states = [{"optimizer": {"head.weight": {"step": 3, "state1": torch.zeros(4, dtype=torch.uint8)}}}] * 2
    with refuses("trainer.resume", "head.weight", "trainer.init_from"):
        mean_of(states)


def test_defaults_are_dilocos():
    nesterov, average = (OuterOptimizer.of(kind, None, None, None, delay=0) for kind in ("nesterov", "average"))
    assert (nesterov.lr, nesterov.momentum, nesterov.mix) == (0.7, 0.9, 0.0)
    assert (average.lr, average.momentum, average.mix) == (1.0, 0.0, 0.0)
    assert OuterOptimizer.of("average", None, None, None, delay=1).mix == 0.5
    with refuses("callbacks.local_sgd.mix=0.5", "delay=0", "callbacks.local_sgd.delay=1"):
        OuterOptimizer.of("average", None, None, 0.5, delay=0)
