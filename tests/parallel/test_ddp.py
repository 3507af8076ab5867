"""DDP broadcasts the buffers that change, and goes without Python's collector."""

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.messages import refuses
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.overlap.callback import Overlap
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.parallel.ddp import DDP
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

CPU, TESTS = torch.device("cpu"), Path(__file__).parents[1]
CHANGING = ["0.running_mean", "0.running_var", "0.num_batches_tracked", "1.largest", "1.wide"]
PASSES = 3


class Numbered(nn.Module):
    """Has a constant as BERT has position_ids, and integers that depend on this rank's data; some on rank 1 alone."""

    ids: Tensor
    largest: Tensor
    wide: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("ids", torch.arange(8) + rank, persistent=False)
        self.register_buffer("largest", torch.tensor(0))
        self.register_buffer("wide", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.copy_(self.largest.max(x.abs().max() * 1000))
            self.wide |= self.rank == 1
        return x + 0.01 * self.ids + 1e-5 * self.largest


def model(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(8), Numbered(rank), nn.Linear(8, 4))


class Broadcasts:
    """Notes the tensors of each broadcast of buffers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tensors: list[list[int]] = []
        broadcast = dist._broadcast_coalesced

        def noted(group: Any, tensors: list[Tensor], *args: Any) -> None:
            self.tensors.append([t.data_ptr() for t in tensors])
            broadcast(group, tensors, *args)

        patch.setattr(dist, "_broadcast_coalesced", noted)

    def names(self, module: nn.Module) -> list[list[str]]:
        known = {b.data_ptr(): name for name, b in module.named_buffers()}
        return [[known[pointer] for pointer in pointers if pointer in known] for pointers in self.tensors]


def passes(place: Place, ours: bool) -> tuple[list[list[str]], list[np.ndarray]]:
    """The broadcasts of each pass after the warm-up; gradients and buffers."""
    ranks, module, arrays = Ranks(place, "cpu", "gloo", 60.0), model(place.rank), list[np.ndarray]()
    layout = DDP(module, place.rank, place.world, CPU, {"static_graph": False}, None, lambda: 0) if ours else None
    called = DistributedDataParallel(module) if layout is None else layout.model
    generator = torch.Generator().manual_seed(place.rank)

    def run_pass() -> None:
        called(torch.randn(5, 8, generator=generator)).square().sum().backward()

    if layout:
        layout.warm_up(run_pass)
    for _ in range(0 if layout else 2):
        run_pass()
    with pytest.MonkeyPatch.context() as patch:
        noted = Broadcasts(patch)
        for _ in range(PASSES):
            run_pass()
            arrays += [t.numpy().copy() for p in module.parameters() for t in (p.grad,) if t is not None]
            arrays += [b.numpy().copy() for b in module.buffers()]
    if layout:
        layout.unwrap()
    called = module  # DDP's reducer must not be the last to hold the group
    ranks.close()
    return noted.names(module), arrays


def test_buffers_that_no_pass_changes_are_not_broadcast_and_the_bits_stay():
    bare, ours = run_ranks(3, passes, False), run_ranks(3, passes, True)
    for (all_names, expected), (names, arrays) in zip(bare, ours, strict=True):
        assert all_names == [[*CHANGING[:3], "1.ids", *CHANGING[3:]]] * PASSES
        assert names == [CHANGING] * PASSES
        assert [a.tobytes() for a in arrays] == [b.tobytes() for b in expected]


def test_what_ranks_count_themselves_and_constants_are_in_step():
    *_, counted, constant, _, _ = zip(*(arrays for _, arrays in run_ranks(3, passes, True)), strict=True)
    assert set(map(int, counted)) == {2 + PASSES}
    assert all((ids == np.arange(8)).all() for ids in constant)  # rank 0's, from DDP's construction


class Constant(Toy):
    """Its model has the constant, and as many ranks as there are make it alike."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Numbered(0), nn.BatchNorm1d(8), nn.Linear(8, 4))


def trained(place: Place, callback: str, share_all: bool) -> tuple[set[str], bytes]:
    """The buffers that are broadcast after the first step, and the weights."""

    class Watch(Callback):
        def on_step_end(self, trainer) -> None:
            if trainer.step == 2:
                noted.tensors.clear()

    deferred: dict[str, Callback] = {"overlap": Overlap()} if callback == "overlap" else {"onebit_adam": OneBitAdam(1)}
    with pytest.MonkeyPatch.context() as patch:
        if share_all:
            patch.setattr("trainer.parallel.ddp.constants", lambda *_: frozenset())
        noted = Broadcasts(patch)
        trainer = Trainer(
            Constant(), {**deferred, "watch": Watch()}, batch=12, place=place, data=DataOptions(workers=0),
            options=Options(max_steps=5, run_dir=f"runs/{share_all}", checkpoint=CheckpointOptions(every_steps=None)),
        )  # fmt: skip
        trainer.loop._finish = lambda: None  # a validation shares all buffers
        trainer.fit()
    names = {name for names in noted.names(trainer.module) for name in names}
    return names, b"".join(t.numpy().tobytes() for t in trainer.module.state_dict().values())


def laid_out_anew(place: Place) -> tuple[list[list[int]], list[np.ndarray]]:
    """The broadcasts of a second layout; weights and gradients after it."""
    ranks, module = Ranks(place, "cpu", "gloo", 60.0), model(place.rank)
    for p in module.parameters():
        p.data += place.rank
    layout = DDP(module, place.rank, place.world, CPU, {"static_graph": False}, None, lambda: 0)
    with pytest.MonkeyPatch.context() as patch:
        noted = Broadcasts(patch)
        layout.lay_out({"bucket_cap_mb": 0.001})
    layout.model(torch.ones(5, 8) + place.rank).square().sum().backward()
    arrays = [t.detach().numpy().copy() for p in module.parameters() for t in (p, p.grad) if t is not None]
    layout.unwrap()
    ranks.close()
    return noted.tensors, arrays


def test_the_weights_are_sent_once():
    """At 100 Mbit/s, 30M parameters take 10 s each time, and `callbacks.bucket.mib=auto` tries several layouts."""
    (sent, first), *others = run_ranks(3, laid_out_anew)
    assert sent == []
    for sent, arrays in others:
        assert sent == [] and all(np.array_equal(a, b) for a, b in zip(first, arrays, strict=True))


@pytest.mark.parametrize("callback", ["overlap", "onebit_adam"])
def test_callbacks_that_replace_ddp_leave_the_same_ones_out(callback):
    before, now = run_ranks(3, trained, callback, True), run_ranks(3, trained, callback, False)
    for (all_names, expected), (names, weights) in zip(before, now, strict=True):
        assert all_names - names == {"1.ids", "1.wide"} and "1.largest" in names
        assert weights == expected


def dropped(place: Place, chain: bool) -> bool:
    """Whether DDP goes with its last reference: its buckets are as large as the gradients."""
    ranks, module = Ranks(place, "cpu", "gloo", 60.0), model(0)
    reduce = AllReduce(ranks.new_group()) if chain else None
    layout = DDP(module, place.rank, place.world, CPU, {"static_graph": False}, reduce, lambda: 0)
    layout.warm_up(lambda: layout.model(torch.ones(5, 8)).sum().backward())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: collected.append(1))
        collected, wrapped = list[int](), weakref.ref(layout.model)
        layout.unwrap()
    ranks.close()
    return wrapped() is None and not collected


ALONE = """
import gc, sys
import torch.distributed as dist
from parallel.test_ddp import dropped
from trainer.process.environment import Place

class Alone:
    def __init__(self, *args):
        dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
        self.close = dist.destroy_process_group

dropped.__globals__["Ranks"] = Alone
assert "torch._dynamo" not in sys.modules
gc.disable()
assert dropped(Place(0, 1, 0, 1), False)
"""


@pytest.mark.parametrize("chain", [False, True])
def test_ddp_is_dropped_without_a_walk_through_all_objects(chain):
    assert all(run_ranks(2, dropped, chain))


@pytest.mark.slow
def test_also_in_a_process_that_has_not_loaded_what_ddp_loads(tmp_path):
    """As torchrun's: an import in DDP's constructor holds its frame, and DDP, in a cycle."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "toy", TESTS.parent)))}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-c", ALONE, str(tmp_path / "store")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_variable_with_which_torch_crashes_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with refuses("TORCH_DISTRIBUTED_DEBUG=DETAIL", "INFO"):
            DDP(nn.Linear(1, 1), 0, 2, CPU, {}, None, lambda: 0)
    finally:
        dist.set_debug_level(before)


@pytest.mark.slow
def test_torch_still_crashes_with_it(tmp_path):
    """Else `refuse_debug` is no longer needed."""
    bare = (
        "import sys, torch; torch.distributed.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0, "
    )
    bare += "world_size=1); torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))"
    env = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", bare, str(tmp_path / "store")], env=env, capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGSEGV
