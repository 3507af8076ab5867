"""The device of a rank, the backend of its device, and what has neither."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.messages import refuses

from trainer.comm.device import has_failed, pick_backend, pick_device, pin
from trainer.errors import ConfigError
from trainer.process.environment import Place

CPU = torch.device("cpu")


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
        "this node has 2 CUDA device(s), and local rank 2 has none; use trainer.devices=2 or trainer.accelerator=cpu"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        pick_device("auto", Place(2, 3, 2, 3))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # one visible to each task
    assert pick_device("auto", Place(2, 3, 2, 3, launcher="srun")) == torch.device("cuda", 0)
    with refuses("trainer.devices", "CUDA", "trainer.devices=1"):
        pick_device("auto", Place(2, 3, 2, 3, launcher="torchrun"))


def test_backends(monkeypatch):
    assert pick_backend("auto", CPU) == "gloo"
    assert pick_backend("auto", torch.device("cuda", 0)) == "nccl"
    assert pick_backend("gloo", torch.device("cuda", 0)) == "gloo"
    with refuses("trainer.backend=nccl", "CUDA", "trainer.backend=gloo"):
        pick_backend("nccl", CPU)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with refuses("trainer.backend=mpi", "MPI", "trainer.backend=gloo"):
        pick_backend("mpi", CPU)


def test_a_device_whose_stream_answers_no_more_has_failed(monkeypatch):
    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    cuda = torch.device("cuda", 0)
    assert not has_failed(CPU)
    for busy in (True, False):
        stream.query.return_value = busy
        assert not has_failed(cuda)
    stream.query.side_effect = torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert has_failed(cuda)


def test_pages_are_locked_exactly_and_until_the_last_view_goes(monkeypatch):
    """torch's own pinned memory is rounded up to a power of two, and never given back."""
    calls = []

    class Cudart:
        def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
            calls.append(("register", start, size))
            return 0

        def cudaHostUnregister(self, start: int) -> int:
            calls.append(("unregister", start))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "check_error", calls.append)
    memory = torch.empty(1000, dtype=torch.uint8)
    start, registered = memory.data_ptr(), [("register", memory.data_ptr(), 1000), 0]
    pin(memory)
    view = memory[10:20].numpy().data
    del memory
    assert calls == registered
    del view
    assert calls == [*registered, ("unregister", start)]
