"""Ranks: agreements, the background thread, and a mean that has the bits of DDP's own reducer."""

import re
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer.distributed import Background, Ranks, all_reduce_mean, comm_hook, pick_backend, pick_device
from trainer.errors import ConfigError
from trainer.launch import Place

CPU = torch.device("cpu")


def agreements(place: Place) -> dict:
    ranks = Ranks(place, "cpu", "auto", 60.0)
    first = ranks.agree((place.rank, 2**40, -place.rank))
    second = ranks.agree((1,))  # two under way, read in the other order
    result = {
        "sums": [second(), first()],
        "gathered": ranks.gather({"name": "x" * place.rank * 7, "none": None, "rank": place.rank}),
        "first": ranks.first(["from", place.rank]),
        "groups": len({id(ranks.new_group()) for _ in range(2)}),
        "timeouts": {
            ranks.host._get_backend(CPU).options._timeout,
            dist.group.WORLD._get_backend(CPU).options._timeout,
        },
    }
    ranks.close()
    return result | {"closed": not dist.is_initialized()}


def test_agreements_are_the_same_on_all_ranks():
    for result in run_ranks(3, agreements):
        assert result["sums"] == [(3,), (3, 3 * 2**40, -3)]
        assert result["gathered"] == [{"name": "x" * rank * 7, "none": None, "rank": rank} for rank in range(3)]
        assert result["first"] == ["from", 0]
        assert result["groups"] == 2
        assert result["timeouts"] == {timedelta(seconds=60)}
        assert result["closed"]


def test_one_rank_starts_nothing():
    ranks = Ranks(Place(), "cpu", "auto", 60.0)
    assert not dist.is_initialized()
    assert ranks.agree((1, 2))() == (1, 2)
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    assert ranks.first("value") == "value"
    ranks.close()


def gradients_by(place: Place, ours: bool) -> list[np.ndarray]:
    """Of 3 backward passes, through DDP's reducer or through ours, over several buckets."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(33, 33) for _ in range(6)])
    model = DDP(module, bucket_cap_mb=0.01)
    if ours:
        model.register_comm_hook(None, comm_hook(all_reduce_mean(ranks.new_group()), Background(CPU)))
    generator = torch.Generator().manual_seed(place.rank)
    result = []
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(5, 33, generator=generator)).square().sum().backward()
        result += [p.grad.numpy().copy() for p in module.parameters()]
    del model
    ranks.close()
    return result


def test_the_chain_has_the_bits_of_ddps_own_reducer():
    plain, ours = run_ranks(3, gradients_by, False), run_ranks(3, gradients_by, True)
    for a, b in zip(plain, ours, strict=True):
        assert [x.tobytes() for x in a] == [y.tobytes() for y in b]


def backward_with_a_lost_peer(place: Place) -> str:
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    model = DDP(nn.Linear(3, 3))

    def reduce(flat: torch.Tensor, bucket: dist.GradBucket) -> torch.Tensor:
        raise ConnectionResetError("peer is gone")

    model.register_comm_hook(None, comm_hook(reduce, Background(CPU)))
    try:
        model(torch.ones(1, 3)).sum().backward()
        message = ""
    except RuntimeError as error:
        message = str(error)
    del model
    ranks.close()
    return message


def test_what_a_reduce_raises_is_what_backward_raises():
    for message in run_ranks(2, backward_with_a_lost_peer):
        assert "ConnectionResetError: peer is gone" in message


def test_background_keeps_the_order_on_one_thread_beside_the_caller():
    background, seen = Background(CPU), []

    def call(number: int, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        seen.append((number, threading.current_thread()))
        return torch.tensor(number)

    futures = [background.submit(call, number, 0.02 / (number + 1)) for number in range(5)]
    assert not futures[-1].done()
    assert [int(future.wait()) for future in futures] == list(range(5))
    assert [number for number, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen}) == 1
    assert threading.current_thread() not in dict(seen).values()
    background.thread.shutdown()


def test_an_error_in_the_background_is_raised_by_wait_and_the_next_call_runs():
    background = Background(CPU)

    def fails() -> torch.Tensor:
        raise ConnectionResetError("peer is gone")

    broken, fine = background.submit(fails), background.submit(lambda: torch.ones(1))
    with pytest.raises(ConnectionResetError, match="peer is gone"):
        broken.wait()
    assert fine.wait() == 1
    background.thread.shutdown()


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", Place(3, 4, 3, 4)) == CPU
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cpu", Place(3, 4, 3, 4)) == CPU
    second = Place(1, 2, 1, 2)
    assert pick_device("auto", second) == pick_device("cuda", second) == torch.device("cuda", 1)
    assert chosen == [1, 1]
    message = (
        "this node has 2 CUDA device(s), and a rank needs number 2; use trainer.devices=2 or trainer.accelerator=cpu"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        pick_device("auto", Place(2, 3, 2, 3))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # one visible to each task
    assert pick_device("auto", Place(2, 3, 2, 3, launcher="srun")) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="this node has 1 CUDA"):
        pick_device("auto", Place(2, 3, 2, 3, launcher="torchrun"))


def test_backends(monkeypatch):
    assert pick_backend("auto", CPU) == "gloo"
    assert pick_backend("auto", torch.device("cuda", 0)) == "nccl"
    assert pick_backend("gloo", torch.device("cuda", 0)) == "gloo"
    with pytest.raises(ConfigError, match=r"trainer\.backend=nccl: needs CUDA.*use trainer\.backend=gloo"):
        pick_backend("nccl", CPU)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.backend=mpi: this torch was built without MPI.*gloo or nccl"):
        pick_backend("mpi", CPU)
