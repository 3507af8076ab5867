"""NCCL on one device, as far as a group of one rank goes, and two gloo ranks that share the device."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.callbacks import CODECS
from support.gpu import DEVICE, ON_GPU, delay, no_waits, on_device
from support.ranks import run_ranks
from torch import Tensor, nn

from trainer.callbacks.grad_compress import GradCompress
from trainer.comm.bucket import Bucket
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce, reduce_scatter
from trainer.comm.watch import Call, watched
from trainer.parallel.ddp import DDP
from trainer.process.environment import Place

BACKEND = "nccl" if ON_GPU else "gloo"

pytestmark = on_device


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[AllReduce]:
    """The end of the chain on a group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    bound = DEVICE if ON_GPU else None
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=1, device_id=bound)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    yield AllReduce(group)
    dist.destroy_process_group()


def test_ddp_through_the_chain_has_the_gradients_of_the_model(alone):
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(DEVICE)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(DEVICE)
    module.load_state_dict(bare.state_dict())
    view = {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True}
    layout = DDP(module, 0, 1, DEVICE, view, alone, lambda: 0)
    for _ in range(3):
        x = torch.randn(8, 64, device=DEVICE)
        for model in (bare, layout.model):
            model.zero_grad()
            model(x).square().sum().backward()
        for a, b in zip(bare.parameters(), module.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    layout.unwrap()


def test_a_constant_is_broadcast_no_more(alone):
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(DEVICE)
    module.register_buffer("position_ids", torch.arange(8, device=DEVICE))
    layout = DDP(module, 0, 1, DEVICE, {"static_graph": False}, None, lambda: 0)
    layout.warm_up(lambda: layout.model(torch.randn(8, 8, device=DEVICE)).sum().backward())
    assert layout.constant_buffers == {"position_ids"}
    assert [buffer.dtype for buffer in layout.model.modules_buffers] == [torch.float32, torch.float32, torch.int64]
    layout.unwrap()


def test_what_codecs_gather_swap_and_scatter(alone):
    rows = torch.arange(6.0, device=DEVICE).view(1, 6)
    assert torch.equal(alone.gather(rows[0]), rows) and torch.equal(alone.swap(rows), rows)
    own = torch.empty(6, device=DEVICE)
    reduce_scatter(own, rows.view(-1), alone.group)
    assert torch.equal(own, rows[0])


# int8 and dgc draw random numbers on the device.
@pytest.mark.parametrize("name", ["bf16", "fp16", "topk", "sign", "powersgd", "blocksparse"])
def test_a_codec_sends_what_it_sends_on_a_cpu(name, alone):
    torch.manual_seed(0)
    gradients = [torch.randn(40, 30), torch.randn(30)]
    results = []
    for device in (torch.device("cpu"), DEVICE):
        compress = CODECS[name]()
        assert isinstance(compress, GradCompress)
        compress.codec.join(1, 0, 0)
        params = [g.to(device) for g in gradients]
        flat = torch.empty(0)
        for step in range(2):  # the second has residuals
            flat = torch.cat([p.reshape(-1) for p in params])
            compress.codec.mean(flat, flat, Bucket.of(params, step), alone if device == DEVICE else Itself())
        results.append(flat.cpu())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


class Itself(AllReduce):
    """The mean over one rank."""

    def __init__(self) -> None:
        self.size = 1

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        return flat

    def gather(self, own: Tensor) -> Tensor:
        return own[None]

    def swap(self, rows: Tensor) -> Tensor:
        return rows


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "topk", "dgc", "sign", "powersgd"])  # blocksparse waits
def test_a_codec_waits_for_nothing(name, alone):
    compress = CODECS[name]()
    assert isinstance(compress, GradCompress)
    compress.codec.join(1, 0, 0)
    params = [torch.randn(400, 300, device=DEVICE), torch.randn(300, device=DEVICE)]
    for step in range(3):
        flat, bucket = torch.cat([p.reshape(-1) for p in params]), Bucket.of(params, step)
        with no_waits() if step else nullcontext():
            compress.codec.mean(flat, flat, bucket, alone)


# int8 and dgc draw random numbers, which the devices have different ones of.
@pytest.mark.parametrize(("name", "density"), [("int8", 1.0), ("dgc", 0.3)])
def test_a_codec_with_random_numbers_stays_within_its_bound(name, density, alone):
    compress = CODECS[name]()
    assert isinstance(compress, GradCompress)
    compress.codec.join(1, 0, 0)
    gradient = torch.randn(4096, device=DEVICE)
    sent = gradient.clone()
    compress.codec.mean(sent, sent, Bucket.of([gradient], 0), alone)
    if name == "int8":  # a rounding up or down on the way there, and one on the way back
        assert (sent - gradient).abs().max() <= 2.1 * gradient.abs().max() / 127
    else:
        kept = sent != 0
        assert 0 < kept.sum() <= 2 * density * len(sent)
        assert sent[kept].abs().mean() > gradient.abs().mean()


def test_a_watched_collective_waits_for_nothing(alone):
    """Its seconds are the device's: without the work before it, and known when it is over."""
    found: list[Call] = []
    flat = torch.ones(1 << 20, device=DEVICE)
    alone(flat, Bucket((), 0))
    with watched(found.append), no_waits():
        delay()
        alone(flat, Bucket((), 0))
        delay()
        assert found[0].arrived() is not ON_GPU
    if ON_GPU:
        torch.cuda.synchronize()
    assert found[0].arrived() and 0 < found[0].seconds() < 0.2


def agreed_beside_the_device(place: Place) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.comm.ranks.pick_device", lambda *_: DEVICE)
        patch.setattr("trainer.comm.ranks.RING", 0)
        ranks = Ranks(place, "auto", "gloo", 60.0)
        delay(2**31)  # about a second
        sums = ranks.agree((1, place.rank))()
        idle = ON_GPU and torch.cuda.current_stream().query()
        ranks.close()
    assert not idle
    return sums


def test_ranks_agree_while_the_device_is_busy():
    assert run_ranks(2, agreed_beside_the_device) == [(2, 1)] * 2
