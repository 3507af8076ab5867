"""The phases of steps on one CUDA device: the device's time, without a wait for it."""

import json
import time
from pathlib import Path

import pytest
from support.gpu import delay, on_device, only_gpu
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.monitors.step_timer import NAMES, StepTimer
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [*on_device, only_gpu]


class Busy(Toy):
    """The device is busy in the forward pass, and the host with the next data meanwhile."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        delay(2**26)
        return super().loss(model, batch)


class Wall(Callback):
    """Takes the time when the device has done all of a logged step."""

    role = Role.MEASURE

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_fit_start(self, trainer) -> None:
        trainer.gathered.append((lambda: self.times.append(time.perf_counter()), lambda values: {}))


def test_the_parts_are_the_time_of_the_device() -> None:
    wall = Wall()
    Trainer(
        Busy(), {"timer": StepTimer(), "wall": wall}, batch=12, place=Place(), data=DataOptions(workers=0),
        options=Options(
            max_steps=15, log_every_steps=5, run_dir="runs/r", accelerator="cuda",
            checkpoint=CheckpointOptions(every_steps=None, every_minutes=None),
        ),
    ).fit()  # fmt: skip
    lines = [json.loads(line) for line in Path("runs/r/step_times.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines] == [5, 5, 5]
    for line, begin, end in zip(lines[1:], wall.times, wall.times[1:], strict=False):
        [times] = line["ranks"]
        assert 5 * times["step"] == pytest.approx(end - begin, rel=0.02)
        assert sum(times[name] for name in NAMES) == pytest.approx(times["step"], rel=1e-6)
        assert times["forward"] > 0.8 * times["step"] and times["communication"] == 0
