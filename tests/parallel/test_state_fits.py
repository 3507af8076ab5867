"""What a run adds to its weights is counted before it is there, and a run that it does not fit is refused."""

import re
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import run
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.ema import EMA
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import Options
from trainer.errors import CONFIG, ConfigError
from trainer.optim.factories import adafactor, adamw, lamb, sgd
from trainer.parallel import state_fits
from trainer.parallel.strategy import SingleDevice
from trainer.process import cgroup
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Counts(Callback):
    """Adds up what is there after the first passes, and what the optimizer and the averages have in the end."""

    role = Role.MEASURE

    def on_before_optimizer_step(self, trainer) -> None:
        held = [p.grad for p in trainer.parameters if p.grad is not None]
        self.gradients = state_fits.size(held) + trainer.strategy.bucket_bytes

    def on_step_end(self, trainer) -> None:
        states = trainer.optimizer.state.values()
        self.state = state_fits.size(
            v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim()
        )
        averaged = trainer.eval_model is not trainer.module
        self.average = averaged * state_fits.size(trainer.eval_model.parameters())


def both(place: Place, optimizer: Any, callbacks: dict[str, Callback]) -> tuple[int, int]:
    """The bytes that are expected, and those that were counted in a run of one step."""
    counts, found = Counts(), []

    def expect(*args: Any) -> int:
        found.append(real(*args))
        return found[-1]

    real, state_fits.added_bytes, small, state_fits.SMALL = state_fits.added_bytes, expect, state_fits.SMALL, 0
    options = Options(
        max_steps=1, run_dir=f"runs/{len(callbacks)}{getattr(callbacks.get('shard'), 'stage', 0)}", accelerator="cpu"
    )
    try:
        Trainer(Toy(), {**callbacks, "counts": counts}, optimizer, batch=12, options=options, place=place).fit()
    finally:
        state_fits.added_bytes, state_fits.SMALL = real, small
    return found[0], counts.gradients + counts.state + counts.average


@pytest.mark.parametrize(
    ("optimizer", "callbacks"),
    [
        (adamw, {}),
        (sgd, {}),
        (partial(sgd, momentum=0.0), {}),
        (lamb, {"ema": EMA()}),
    ],
)
def test_gradients_state_and_averages_are_as_predicted(optimizer, callbacks, tmp_path):
    expected, counted = both(Place(), optimizer, callbacks)
    assert expected == counted > 0


def test_what_is_not_certain_does_not_count(tmp_path):
    """Adafactor has vectors. Gradients that a callback may drop in the backward pass are not there together."""
    expected, counted = both(Place(), adafactor, {})
    assert WEIGHTS <= expected < counted
    model = Toy().model()
    assert state_fits.added_bytes(SingleDevice(model), model, 2.0, averaged=False, in_backward=True) == 2 * WEIGHTS


def stages(place: Place) -> list[tuple[int, int]]:
    return [both(place, adamw, {"shard": Shard(stage)} if stage else {}) for stage in (0, 1, 2, 3)]


def test_shares_of_ranks_are_as_predicted(tmp_path):
    for expected, counted in chain.from_iterable(run_ranks(3, stages)):
        assert expected == counted > 0


WEIGHTS = 4 * (8 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 4 + 4)  # bytes of Toy


def started(place: Place, adds: int) -> str:
    """Start ranks on a machine that has so many bytes, and return the refusal."""
    proc = Path(f"proc-{place.rank}")
    proc.mkdir(exist_ok=True)
    (proc / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {adds >> 10} kB\nSwapFree: 2 kB\n")
    read = partial(cgroup.available_memory, proc, proc)
    options = Options(max_steps=1, run_dir=f"runs/{adds}", accelerator="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroup, "available_memory", read)
        patch.setattr(state_fits, "SMALL", 0)
        try:
            Trainer(Toy(), {}, batch=12, options=options, place=place).fit()
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_of_a_machine_share_its_memory(tmp_path):
    """Three ranks add gradients, DDP's buckets and two moments each. All are refused, in the same words."""
    adds = 3 * WEIGHTS * (1 + 1 + 2)
    assert run_ranks(3, started, adds - 1024) == [""] * 3  # swap counts
    first, *others = run_ranks(3, started, adds - 2049)
    assert others == [first] * 2 and first.startswith(
        "trainer.devices=3: weights, gradients and optimizer state of 3 rank(s) of this machine take 0.0 GiB"
    )
    assert "use fewer trainer.devices, '+callbacks=[shard]'" in first


LARGE = """
import torch
from torch import nn
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty({elements}))
class Recipe:
    def model(self):
        return Large()
    def data(self, split):
        return list(range(8)) if split == "train" else None
    def loss(self, model, batch):
        raise AssertionError("a step has begun")
"""


def test_the_command_is_refused_in_one_line_before_a_step(tmp_path):
    """Weights that nobody has written take no memory: this test needs none."""
    found = cgroup.available_memory()
    assert found
    elements = int(0.4 * (found.free + found.swap)) // 4
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "large.yaml").write_text(
        "# @package _global_\n# Too large\nrecipe:\n  _target_: large.Recipe\n"
    )
    (tmp_path / "large.py").write_text(LARGE.format(elements=elements))
    knobs = ["batch=4", "optimizer.lr=1", "trainer.max_steps=1", "trainer.accelerator=cpu", "trainer.run_dir=runs/r"]
    result = run(["--config-dir", "conf", "recipe=large", "trainer.allow_targets=[large]", *knobs], tmp_path)
    assert result.code == CONFIG, result.err
    line = result.err.splitlines()[-1]
    assert re.fullmatch(
        r"echelon: trainer.devices=1: weights, gradients and optimizer state of 1 rank\(s\) of this machine take "
        r"[0-9.]+ GiB, and [0-9.]+ GiB of memory are available; use a smaller model or a machine with more memory",
        line,
    ), result.err
