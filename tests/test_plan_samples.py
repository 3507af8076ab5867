"""Samples are the unit of time: a resume with another batch ends, validates and lowers its rate where samples say."""

import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.messages import refuses
from torch.utils.data import DataLoader
from toy_recipe import Toy

from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.loggers.metrics_file import MetricsFile
from trainer.optim.schedule import Linear
from trainer.plan import Plan, split_by
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

SAMPLES, PEAK = 96, 1e-3


@pytest.mark.parametrize(
    ("resumed", "ways"),
    [
        (False, "set batch=24 or batch=48 or batch=72, or give the DataLoader batch_size=64"),
        (True, "give the DataLoader batch_size=64, or set batch=24 or batch=48 or batch=72"),
    ],
)
def test_the_batch_of_a_data_loader_is_offered_first_unless_a_resume_would_change_it(resumed, ways):
    with pytest.raises(ConfigError, match=f"on each of 1 rank\\(s\\); {ways}$"):
        split_by(24, 64, 1, resumed)


def fit(batch: int, max_epochs: float, schedule: Any = None, **options: Any) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl: one of each step, and one of each validation."""
    trainer = Trainer(
        Toy(samples=SAMPLES), {"metrics_file": MetricsFile()}, schedule=schedule or Linear(), batch=batch,
        place=Place(),
        options=Options(
            run_dir="runs/r", max_epochs=max_epochs, validate_every="1 epochs", log_every_steps=1, accept=["batch"],
            resume="auto", checkpoint=CheckpointOptions(every_steps=None), **options,
        ),
        data=DataOptions(workers=0),
    )  # fmt: skip
    trainer.fit()
    return [json.loads(line) for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("first", "then"), [(12, 24), (24, 8), (16, 36)])
def test_epochs_and_validations_count_samples(first, then):
    fit(first, 1)
    lines = fit(then, 3)
    begun = SAMPLES // first
    steps = begun + math.ceil(2 * SAMPLES / then)
    assert (lines[-1]["step"], lines[-1]["samples"]) == (steps, SAMPLES + (steps - begun) * then)
    validated = [line["samples"] for line in lines if "val/loss" in line]
    if SAMPLES % then == 0:
        assert validated == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES]


def test_the_rate_is_a_function_of_samples():
    """Warm-up over an epoch, then linear to 0 at the end of the fourth: as without the resume, at the same samples."""
    schedule = Linear(warmup="1 epochs")
    fit(12, 0.5, schedule, max_steps=4)
    found = {line["samples"]: line["train/lr"] for line in fit(24, 4, schedule) if "train/lr" in line}
    for samples in range(72, 4 * SAMPLES + 1, 24):
        step, warmup, total = samples / 24 - 1, SAMPLES / 24, 4 * SAMPLES / 24
        factor = (step + 1) / warmup if step < warmup else (total - step) / (total - warmup)
        assert found[samples] == pytest.approx(PEAK * factor)


def test_a_run_that_has_trained_on_all_samples_is_over(caplog):
    fit(12, 2)
    assert fit(24, 1)[-1]["samples"] == 2 * SAMPLES


def test_steps_stay_steps():
    fit(12, 1)
    lines = fit(24, 9, max_steps=11)
    assert (lines[-1]["step"], lines[-1]["samples"]) == (11, SAMPLES + 3 * 24)


class Loaded(Toy):
    """Its training data are the batches of a DataLoader."""

    def __init__(self, batch_size: int, drop_last: bool = False) -> None:
        super().__init__(samples=70)
        self.loader = partial(DataLoader, batch_size=batch_size, drop_last=drop_last)

    def data(self, split: str) -> Any:
        return self.loader(super().data(split)) if split == "train" else None


def of_loader(batch: int, max_epochs: int, accept: list[str], drop_last: bool = False) -> int:
    """Return the samples of a run after all epochs."""
    options = Options(run_dir="runs/r", max_epochs=max_epochs, accept=accept, resume="auto")
    trainer = Trainer(Loaded(batch, drop_last), batch=batch, options=options, place=Place())
    trainer.fit()
    return trainer.samples


def test_a_resume_whose_passes_have_other_samples_is_refused(capsys):
    """70 samples are 5 batches of 16, which count as 80, and 3 batches of 32, which count as 96."""
    assert of_loader(16, 2, []) == 160
    assert of_loader(16, 3, []) == 240
    with refuses("trainer.resume", "80", "96", "drop_last=True"):
        of_loader(32, 4, ["batch"])
    assert of_loader(32, 4, ["batch", "data"]) == 400
    assert "a pass over recipe.data('train') had 80 samples" in capsys.readouterr().out


def test_whole_batches_resume_with_another_batch():
    """Without the last 6 samples, 4 batches of 16 and 2 of 32 are the same 64."""
    of_loader(16, 2, [], drop_last=True)
    assert of_loader(32, 4, ["batch"], drop_last=True) == 4 * 64


def plan_of(samples: int, batch: int, every: str, manifest: dict[str, Any] | None = None) -> Plan:
    """Return the plan of a run, which `manifest` may have begun."""
    made = Plan(
        Toy(samples=samples), {}, Linear(), batch=batch, micro_batch=None, accumulate=None, place=Place(),
        options=Options(max_epochs=25, validate_every=every), data=DataOptions(workers=0), each=lambda value: [value],
    )  # fmt: skip
    made.resumed, made.manifest = Path("there") if manifest else None, manifest or {}
    made._set_time(Linear(), None)
    return made


@pytest.mark.parametrize(
    ("every", "first"),
    [("1 epochs", [4, 7, 10, 13, 16, 19, 22, 25]), ("50 samples", [2, 4, 5, 7, 8]), ("3 steps", [3, 6, 9])],
)
def test_a_validation_is_at_the_first_step_that_reaches_each_multiple(every, first):
    """100 samples in batches of 32: the epochs end in the middle of a batch. 25 epochs are 25 validations."""
    plan = plan_of(100, 32, every)
    found = [step for step in range(1, 80) if plan.validates_at(step)]
    assert found[: len(first)] == first
    steps = itertools.accumulate(first, lambda step, _: plan.next_validation(step), initial=0)
    assert list(steps)[1:] == first
    if every == "1 epochs":
        assert found == [math.ceil(n * 100 / 32) for n in range(1, 26)]


@pytest.mark.parametrize(("batch", "last"), [(32, 64), (24, 96), (8, 104)])
def test_a_resume_with_another_batch_validates_at_the_same_multiples(batch, last):
    """A multiple that the checkpoint's last step has reached is its own."""
    before = {"samples": last, "step": last // 32, "identity": {"batch": 32}}
    plan, step = plan_of(100, batch, "1 epochs", before), last // 32
    found = [plan.samples_at(n) for n in range(step, step + 60) if plan.validates_at(n)]
    own = [last + math.ceil((n * 100 - last) / batch) * batch for n in range(1, 9) if n * 100 > last]
    assert plan.samples_at(int(plan.next_validation(step))) == own[0]
    assert found[:4] == ([last] * (last - 32 < 100 <= last) + own)[:4]
