"""Real errors of memory on one CUDA device: the search finds a size, and a step that fails is run again."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.gpu import ACCELERATOR, on_device, only_gpu
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callbacks.auto_batch import AutoBatch
from trainer.callbacks.hetero_batch.clock import ComputeClock
from trainer.checks.recipe import CheckedLoss
from trainer.comm.phases import Phase, switch
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.batch import Micro, Step
from trainer.parallel.forward_backward import Accumulate
from trainer.parallel.strategy import SingleDevice
from trainer.precision import Precision
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [*on_device, only_gpu]


class Large(Toy):
    """Needs a part of the device's memory for each sample, from a step on; `share` of it for 4 samples."""

    step = 0

    def __init__(self, share: float, since: int = 0) -> None:
        super().__init__(dtype="float64")
        self.share, self.since = share, since

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        if self.step >= self.since and torch.is_grad_enabled():
            total = torch.cuda.get_device_properties(loss.device).total_memory
            torch.empty(int(len(batch["x"]) * self.share * total / 4), dtype=torch.uint8, device=loss.device)
        return loss


class Counted(AutoBatch):
    def on_step_end(self, trainer: Any) -> None:
        trainer.recipe.step = trainer.step


def train(name: str, recipe: Toy, callback: AutoBatch | None) -> Tensor:
    trainer = Trainer(
        recipe, {"mine": callback} if callback else {}, batch=12, micro_batch=12, place=Place(),
        data=DataOptions(workers=0),
        options=Options(
            max_steps=6, run_dir=f"runs/{name}", accelerator=ACCELERATOR, checkpoint=CheckpointOptions(every_steps=None)
        ),
    )  # fmt: skip
    trainer.fit()
    return torch.cat([p.detach().flatten().cpu() for p in trainer.parameters])


@pytest.mark.parametrize("since", [0, 3])
def test_the_numbers_stay_when_memory_runs_out(since, tmp_path):
    """12 samples ask for 1.8 times the device's memory, 5 for three quarters of it."""
    plain = train("plain", Toy(dtype="float64"), None)
    callback = Counted()
    found = train("found", Large(0.6, since), callback)
    assert 3 <= callback.micro <= 6
    assert callback.made.made[-1].value["micro"] == callback.micro < 12
    assert abs(found - plain).max() < 1e-12


class Heavy:
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        for _ in range(20):
            batch = batch @ batch / 100
        return model(batch).mean()


def test_the_clock_reads_events_and_waits_for_nothing():
    device = torch.device(ACCELERATOR, 0)
    model = nn.Linear(512, 1).to(device)
    strategy = SingleDevice(model)
    run = Accumulate(CheckedLoss(Heavy().loss, len), strategy, Precision("fp32", device).scaler)
    clock = ComputeClock(device)
    undo = ExitStack()
    clock.attach(undo)
    for samples in (3, 5):
        step = Step([Micro(torch.rand(512, 512, device=device), 512, [], []) for _ in range(2)])
        torch.cuda.set_sync_debug_mode("error")
        clock.timed(run, step, lambda: 1024, samples)
        clock.take()
        torch.cuda.set_sync_debug_mode("default")
        model.weight.grad = None
    torch.cuda.synchronize()
    clock.steps.clear()
    switch(Phase.OPTIMIZER)  # what comes between the steps
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    clock.timed(run, Step([Micro(torch.rand(512, 512, device=device), 512, [], [])]), lambda: 512, 7)
    ended.record()
    torch.cuda.synchronize()
    samples, seconds = clock.take()
    clock.detach()
    undo.close()
    assert samples == 7 and 0 < seconds <= began.elapsed_time(ended) / 1000
