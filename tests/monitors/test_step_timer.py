"""Times of the test's own land in the phase that spends them; on real ranks, each wait lands on those who wait."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.monitors.memory.callback import Memory
from trainer.monitors.metrics_file import MetricsFile
from trainer.monitors.step_timer import NAMES, StepTimer, metrics
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

NOW = [0.0]


def work(seconds: float) -> None:
    NOW[0] += seconds


def options(**others: Any) -> Options:
    checkpoint = CheckpointOptions(every_steps=others.pop("save", None), every_minutes=None)
    return Options(**{"run_dir": "run", "timeout_s": 60.0, "checkpoint": checkpoint, **others})


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/step_times.jsonl").read_text().splitlines()]


def parts(times: dict[str, float]) -> dict[str, float]:
    return {name: times[name] for name in NAMES if times[name]}


class Slow(Toy):
    """Spends time in each method that a step calls, and in its backward pass."""

    def data(self, split: str) -> Any:
        whole, slow = super().data(split), split == "train"

        class Data(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(whole)

            def __getitem__(self, i: int) -> Any:
                work(slow)
                return whole[i]

        return Data()

    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda module, args, output: Spend.apply(output))
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        work(2)
        return super().loss(model, batch)


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        work(3)
        return gradient


class Busy(Callback):
    """Spends time in its hooks."""

    role = Role.GUARD

    def wrap_optimizer(self, trainer, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(lambda *_: work(5))
        return optimizer

    def on_before_optimizer_step(self, trainer) -> None:
        work(7)

    def on_step_end(self, trainer) -> None:
        work(11)

    def on_flush(self, trainer) -> None:
        work(13)  # of the checkpoint, or of the validation, that asks for it

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        work(17)

    def state_dict(self) -> dict[str, Any]:
        work(19)
        return {}


@pytest.fixture
def timer(tmp_path, monkeypatch) -> StepTimer:
    monkeypatch.chdir(tmp_path)
    timer = StepTimer()
    timer.now = lambda: NOW[0]
    return timer


def test_each_second_is_in_the_phase_that_spends_it(timer: StepTimer) -> None:
    """12 samples a step in 2 micro-batches; a validation at step 2, a checkpoint at step 3; logged at steps 2 and 4.

    What follows a logged step is of the steps after it.
    """
    trainer = Trainer(
        Slow(), {"timer": timer, "busy": Busy()}, batch=12, accumulate=2, place=Place(), data=DataOptions(workers=0),
        options=options(max_steps=4, log_every_steps=2, validate_every=2, save=3),
    )  # fmt: skip
    trainer.fit()
    step = {"data": 12.0, "forward": 4.0, "backward": 6.0, "optimizer": 5.0, "callbacks": 18.0}
    first, second = lines()
    assert [(line["step"], line["steps"], len(line["ranks"])) for line in (first, second)] == [(2, 2, 1), (4, 2, 1)]
    # The first batch was loaded before the clock began, and step 2's callback comes after its numbers.
    assert parts(first["ranks"][0]) == step | {"data": 6.0, "callbacks": 18.0 - 5.5}
    found = parts(second["ranks"][0])
    validation = 13 + 17 + 2 * 2  # 13 samples to validate are 2 calls of the loss of 2 seconds
    saved = 13 + 19
    assert found.pop("validation") >= validation / 2 and found.pop("checkpoint") == saved / 2
    assert found == step
    assert second["ranks"][0]["step"] == sum(parts(second["ranks"][0]).values())
    assert {name: trainer.last_metrics[f"time/{name}"] for name in NAMES} == {
        name: second["ranks"][0][name] for name in NAMES
    }
    assert json.loads(Path("run/summary.json").read_text())["time/optimizer"] == 5.0


SLEEP_S = 0.04
STEPS = 6


class Late(Toy):
    """The last rank is late with each of its forward passes."""

    def __init__(self, late: bool) -> None:
        super().__init__(depth=3)
        self.late = late

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(SLEEP_S * self.late)
        return super().loss(model, batch)


class Watch(Callback):
    """Takes the time of a run by a clock of its own, and counts the exchanges of numbers."""

    role = Role.MEASURE

    def on_fit_start(self, trainer) -> None:
        self.began, self.took, self.gathers = time.monotonic(), 0.0, 0
        gather = trainer.ranks.gather

        def counted(*args: Any) -> Any:
            self.gathers += 1
            return gather(*args)

        trainer.ranks.gather = counted
        trainer.gathered.append((self._read, lambda values: {}))

    def _read(self) -> None:
        self.took = time.monotonic() - self.began


def run(place: Place, callbacks: dict[str, Callback], recipe: Any = None, accumulate: int = 1) -> Watch:
    torch.manual_seed(0)
    watch = Watch()
    trainer = Trainer(
        recipe or Late(place.rank == place.world - 1), {**callbacks, "timer": StepTimer(), "watch": watch}, adamw,
        batch=24, accumulate=accumulate, place=place, data=DataOptions(workers=0),
        options=options(max_steps=STEPS, log_every_steps=STEPS // 2),
    )  # fmt: skip
    trainer.fit()
    watch.metrics = trainer.last_metrics
    return watch


CASES: dict[str, tuple[Callable[[], dict[str, Callback]], int]] = {
    "ddp": (dict, 1),
    "accumulation": (dict, 2),
    "overlap": (lambda: {"overlap": Overlap()}, 1),
    "optimizer_in_backward": (lambda: {"optimizer_in_backward": OptimizerInBackward()}, 1),
    "local_sgd": (lambda: {"local_sgd": LocalSGD(every=2)}, 1),
    "onebit_adam": (lambda: {"onebit_adam": OneBitAdam(warmup_steps=3)}, 1),
    "shard.1": (lambda: {"shard": Shard(1)}, 1),
    "shard.2": (lambda: {"shard": Shard(2)}, 2),
    "shard.3": (lambda: {"shard": Shard(3)}, 1),
    "pipeline": (lambda: {"pipeline": PipelineParallel(stages=3, schedule="1f1b")}, 4),
    "pipedream": (lambda: {"pipeline": PipelineParallel(stages=3, schedule="pipedream_2bw")}, 4),
    "hetero_batch": (lambda: {"hetero_batch": HeteroBatch(every=2)}, 1),
}
def times_of(place: Place, case: str) -> tuple[float, int, dict[str, float]]:
    make, accumulate = CASES[case]
    watch = run(place, make(), accumulate=accumulate)
    return watch.took, watch.gathers, watch.metrics


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_wait_for_a_late_one_communicate(case: str, tmp_path, monkeypatch) -> None:
    """The late rank computes. The parts are the time of the run, by another clock, to 2 %."""
    monkeypatch.chdir(tmp_path)
    found = run_ranks(3, times_of, case)
    late = SLEEP_S * CASES[case][1]
    ranks = [line["ranks"] for line in lines()]
    for rank, (took, _, _) in enumerate(found):
        assert sum(STEPS // 2 * each[rank]["step"] for each in ranks) == pytest.approx(took, rel=0.02)
    for each in ranks:
        for times in each:
            assert sum(parts(times).values()) == pytest.approx(times["step"], abs=1e-7)
    waiting, waited, slow = ranks[-1]
    assert min(waiting["communication"], waited["communication"]) > slow["communication"] + late / 2
    assert slow["forward"] >= late > 2 * max(waiting["forward"], waited["forward"])
    assert found[0][2]["time/slowest_rank"] == 2 and found[0][2]["time/spread"] > 1
