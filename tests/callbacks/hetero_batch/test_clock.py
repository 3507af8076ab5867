"""The clock counts a rank's computing, and none of its waits, on a clock that the test moves."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Wrapped
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.callbacks.hetero_batch.clock import ComputeClock
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import DataOptions, Options
from trainer.data.batch import Micro, Step
from trainer.parallel.strategy import SingleDevice
from trainer.process.environment import Place
from trainer.trainer import Trainer

WORLD = 3
NOW = [0.0]
COSTS = (1.0, 2.0, 5.0)  # seconds that the ranks take for a sample


class Late(Callback):
    """Ranks 0 and 1 wait as long as others take: for the weight of a step, for its buffers, and for its reduction."""

    def wrap_reduce(self, trainer, reduce: Any) -> Any:
        def late(flat: Tensor, bucket: Any) -> Tensor:
            self.wait(trainer)
            return reduce(flat, bucket)

        return late

    def wait(self, trainer: Any) -> None:
        """On the clock of a rank that waits, when its own computing has ended."""
        clock = trainer.callbacks["mine"].clock
        for _ in range(1000):
            if clock.begun is None:
                break
            time.sleep(0.001)
        NOW[0] += 1000.0


class Outer(Callback):
    """Outside of the measurement: the total weight comes late."""

    role = Role.GUARD

    def wrap_forward_backward(self, trainer, run: Any) -> Any:
        def passes(data: Any, total: Callable[[], int]) -> Any:
            def late() -> int:
                NOW[0] += 1000.0
                return total()

            return run(data, late)

        return passes


class Normed(Toy):
    """Has a buffer that DDP shares, for which a rank waits. The last parameter gets its gradient last."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("seen", torch.zeros(()))
        model.add_module("offset", offset := nn.ParameterList([torch.zeros(())]))
        model.register_forward_pre_hook(lambda module, x: (module.seen.add_(1.0), x[0] + offset[0])[1:])  # pyright: ignore
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        NOW[0] += len(batch["x"]) * COSTS[dist.get_rank()]
        return super().loss(model, batch)


def waits(place: Place, sharded: bool) -> list[float]:
    share, calls = Wrapped._sync_buffers, []

    def late(self: Any) -> None:
        calls.append(1)
        NOW[0] += 1000.0
        share(self)

    mine = HeteroBatch(every=2, smoothing=0.0)
    mine.now = lambda: NOW[0]
    Wrapped._sync_buffers = late  # pyright: ignore[reportAttributeAccessIssue]
    try:
        trainer = Trainer(
            Normed(), {"mine": mine, "late": Late(), "outer": Outer(), **({"shard": Shard(2)} if sharded else {})},
            batch=24, accumulate=2, place=place,
            options=Options(max_steps=4, timeout_s=30.0), data=DataOptions(workers=0),
        )  # fmt: skip
        trainer.fit()
    finally:
        Wrapped._sync_buffers = share
    assert sharded or len(calls) >= 4
    return mine.speeds


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "shard.2"])
def test_waits_for_other_ranks_do_not_count(sharded, tmp_path, monkeypatch):
    """The first gradient queues the wait of stage 2, the last one DDP's."""
    monkeypatch.chdir(tmp_path)
    assert run_ranks(WORLD, waits, sharded) == [pytest.approx([1.0, 0.5, 0.2])] * WORLD


class Passes:
    """Two micro-batches of 3 seconds forward and 4 seconds backward; the last one then waits for 100 seconds."""

    def __init__(self, model: nn.Linear, parameter: Tensor) -> None:
        self.model, self.parameter = model, parameter

    def __call__(self, data: Step, total: Callable[[], int]) -> list[Tensor]:
        for number, (batch, _) in enumerate(data):
            NOW[0] += 3.0
            loss = self.model(batch).sum() + 0 * self.parameter.sum()
            total()
            NOW[0] += 4.0
            loss.backward()
            NOW[0] += 100.0 * number
        return []


def step() -> Step:
    return Step([Micro(torch.ones(2, 2), 2, [], []) for _ in range(2)])


def test_forward_and_backward_passes_count():
    model = nn.Linear(2, 1)
    clock = ComputeClock(torch.device("cpu"), lambda: NOW[0])
    run = Passes(model, torch.ones(()))
    clock.timed(run, step(), lambda: 4, 9)
    assert clock.take() == (0, 0.0)  # nothing watches the ends of passes yet
    clock.attach(SingleDevice(model), model)
    for _ in range(2):
        clock.timed(run, step(), lambda: 4, 9)
    assert clock.take() == (18, 28.0) and clock.take() == (0, 0.0)
    clock.detach()
    assert not model.bias._backward_hooks


def test_a_step_whose_end_nobody_saw_does_not_count():
    """The watched parameter has no gradient, so the wait can't be told from the pass."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    clock = ComputeClock(torch.device("cpu"), lambda: NOW[0])
    clock.attach(SingleDevice(other), other)
    clock.timed(Passes(model, torch.ones(())), step(), lambda: 4, 9)
    assert clock.take() == (0, 0.0)
    clock.detach()
