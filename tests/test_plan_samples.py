"""Samples are the unit of time: a resume with another batch ends, validates and lowers its rate where samples say."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from toy_recipe import Toy

from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.monitors.metrics_file import MetricsFile
from trainer.optim.schedule import Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

SAMPLES, PEAK = 96, 1e-3


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


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


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
