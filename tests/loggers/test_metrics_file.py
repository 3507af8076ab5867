"""One line for each logged step and validation: none lost, none repeated, and JSON also where a run has diverged."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.loggers.metrics_file import MetricsFile
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Stop(Callback):
    """Ends the run as a crash would, after the step's line is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer) -> None:
        if trainer.step == self.step:
            raise KeyboardInterrupt


def run(recipe: Toy, resume: str | None = None, log_every: int = 1, **callbacks: Callback) -> Trainer:
    trainer = Trainer(
        recipe,
        {"metrics_file": MetricsFile(), **callbacks},
        batch=12,
        options=Options(
            max_steps=8, validate_every=4, log_every_steps=log_every, run_dir="runs/r", resume=resume,
            checkpoint=CheckpointOptions(every_steps=3),
        ),
        data=DataOptions(workers=0),
        place=Place(),
    )  # fmt: skip
    trainer.fit()
    return trainer


def lines() -> list[dict]:
    return [json.loads(line) for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]


def kinds() -> list[tuple[int, str]]:
    return [(line["step"], "val" if "val/loss" in line else "train") for line in lines()]


EVERY_LINE = [
    *((step, "train") for step in (1, 2, 3, 4)), (4, "val"),
    *((step, "train") for step in (5, 6, 7, 8)), (8, "val"),
]  # fmt: skip


def test_a_line_for_each_logged_step_and_validation(tmp_path):
    run(Toy())
    assert kinds() == EVERY_LINE
    first = lines()[0]
    assert list(first)[:3] == ["step", "samples", "seconds"]
    assert (first["samples"], first["train/lr"]) == (12, 0.001)
    assert first.keys() == {"step", "samples", "seconds", "train/loss", "train/lr", "train/grad_norm"}


def test_every_so_many_steps_and_the_last(tmp_path):
    run(Toy(), log_every=3)
    assert kinds() == [(3, "train"), (4, "val"), (6, "train"), (8, "train"), (8, "val")]


@pytest.mark.parametrize("torn", ["", '{"step": 6, "samp'])
def test_a_resume_cuts_what_was_written_after_its_checkpoint(torn, tmp_path):
    """Stopped at step 5 of which 3 are in the checkpoint; the last line may be torn."""
    with pytest.raises(KeyboardInterrupt):
        run(Toy(), stop=Stop(5))
    assert kinds() == EVERY_LINE[:6]
    with open("runs/r/metrics.jsonl", "a") as file:
        file.write(torn)
    run(Toy(), resume="auto")
    assert kinds() == EVERY_LINE


class Diverged(Toy):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, batch) * (1.0 if model.training else float("nan"))


def test_a_diverged_run_still_writes_everything(tmp_path):
    """NaN becomes null in the file, is no best value, and hinders neither a checkpoint nor the summary."""
    trainer = run(Diverged())
    assert [line["val/loss"] for line in lines() if "val/loss" in line] == [None, None]
    assert trainer.checkpoint is not None and trainer.checkpoint.name == "step-00000008"
    summary = json.loads(Path("runs/r/summary.json").read_text())
    assert (summary["val/loss"], summary["best"]) == (None, {})


def test_only_rank_0_writes(tmp_path):
    callback, trainer = MetricsFile(), Trainer(Toy(), batch=12, options=Options(max_steps=1), place=Place())
    trainer.rank, trainer.metrics = 1, {"train/loss": 1.0}
    callback.on_fit_start(trainer)
    callback.on_step_end(trainer)
    callback.on_fit_end(trainer)
    assert not (trainer.run_dir / "metrics.jsonl").exists()
    assert callback.state_dict() == {"bytes": 0, "kept": ""}
    trainer.close()
