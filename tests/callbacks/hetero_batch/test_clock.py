"""The clock counts a rank's computing, and none of its waits, on a clock that the test moves."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.callbacks.hetero_batch.clock import ComputeClock
from trainer.callbacks.shard.callback import Shard
from trainer.comm.phases import Phase, running, switch
from trainer.config.options import DataOptions, Options
from trainer.data.batch import Micro, Step
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
            if clock.clock is None or clock.clock.phase == Phase.COMMUNICATION:
                break
            time.sleep(0.001)
        NOW[0] += 1000.0


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
    """The agreement on a step and its buffers come late, too."""
    calls = {"wait": 0, "_broadcast_coalesced": 0}

    def late(wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                calls[wait.__name__] += 1
                NOW[0] += 1000.0
            return wait(*args, **kwargs)

        return call

    mine = HeteroBatch(every=2, smoothing=0.0)
    mine.now = lambda: NOW[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.Work, "wait", late(dist.Work.wait))
        patch.setattr(dist, "_broadcast_coalesced", late(dist._broadcast_coalesced))
        trainer = Trainer(
            Normed(), {"mine": mine, "late": Late(), **({"shard": Shard(2)} if sharded else {})},
            batch=24, accumulate=2, place=place,
            options=Options(max_steps=4, timeout_s=30.0), data=DataOptions(workers=0),
        )  # fmt: skip
        trainer.fit()
    assert min(calls.values()) >= 4
    return mine.speeds


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "shard.2"])
def test_waits_for_other_ranks_do_not_count(sharded, tmp_path):
    """The first gradient queues the wait of stage 2, the last one DDP's."""
    assert run_ranks(WORLD, waits, sharded) == [pytest.approx([1.0, 0.5, 0.2])] * WORLD


def passes(data: Step, total: Callable[[], int]) -> list[Tensor]:
    """Two micro-batches of 3 seconds forward, 2 of waiting and 4 seconds backward; then 100 seconds of waiting."""
    for _ in data:
        for phase, seconds in ((Phase.FORWARD, 3), (Phase.COMMUNICATION, 2), (Phase.BACKWARD, 4)):
            switch(phase)
            NOW[0] += seconds
    switch(Phase.COMMUNICATION)
    NOW[0] += 100
    return []


def step() -> Step:
    return Step([Micro(torch.ones(2, 2), 2, [], []) for _ in range(2)])


def test_forward_and_backward_passes_count() -> None:
    clock = ComputeClock(torch.device("cpu"), lambda: NOW[0])
    clock.timed(passes, step(), lambda: 4, 9)
    assert clock.take() == (0, 0.0)  # not attached yet
    with ExitStack() as undo:
        clock.attach(undo)
        for _ in range(2):
            passes(step(), lambda: 4)  # of others
            clock.timed(passes, step(), lambda: 4, 9)
        assert clock.take() == (18, 28.0) and clock.take() == (0, 0.0)
        clock.detach()
    assert running.clock is None
