"""The end of a run: the command that goes on, and the numbers in lines that a reader takes in."""

import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.context import Command
from trainer.summary import best_in_words, earlier, go_on, grouped, resume, tell_place

ELASTIC = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_the_command_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # without a script beside it
    monkeypatch.setenv("PATH", "")
    typed, rest = ["trainer.resume=x", "batch=${a b}"], "-m trainer.main 'batch=${a b}' trainer.resume=ckpt/r"
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert go_on(typed, Path("ckpt/r")) == f"./python {rest}"
    assert go_on(None, Path("ckpt/r")) == "Options(resume='ckpt/r')"
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    assert go_on(typed, Path("ckpt/r")) == f"the same torchrun ... {rest}"
    monkeypatch.setenv("ECHELON_STORE", "/s")
    assert go_on(typed, Path("ckpt/r")) == f"./python {rest}"


def test_the_short_command_that_goes_on(tmp_path):
    trainer: Any = SimpleNamespace(run_dir=Path("r"), command=Command([]))
    assert resume(trainer) == ""  # no config
    Path("r").mkdir()
    Path("r/config.yaml").write_text("recipe: {hub_token: '***'}")
    assert resume(trainer) == ""  # a setting that was not stored
    Path("r/config.yaml").write_text("recipe: {}")
    assert shlex.split(resume(trainer))[-2:] == ["resume", "r"]


def test_numbers_are_in_a_line_for_each_group():
    numbers = {"train/loss": 0.123456, "val/loss": 2.0, "train/samples": 1234567.0, "accuracy": math.nan}
    assert grouped(numbers) == {"train": "loss 0.1235  samples 1,234,567", "val": "loss 2", "task": "accuracy nan"}


def test_whether_the_best_checkpoint_is_kept_is_said(tmp_path):
    best = {"metric": "val/loss", "value": 0.5, "step": 3}
    assert best_in_words(best, None) == "val/loss 0.5 at step 3"  # nothing was saved
    assert best_in_words(best, tmp_path / "step-00000009") == "val/loss 0.5 at step 3, not kept"
    (tmp_path / "step-00000003").mkdir()
    assert best_in_words(best, tmp_path / "step-00000009").endswith(f" at step 3, in {tmp_path}/step-00000003")


def test_the_time_of_a_step_is_said_in_words():
    """Parts below one percent are left out, and so is a slowest rank that nobody waits for."""
    step = {"time/step": 0.02, "time/data": 0.0001, "time/forward": 0.006, "time/backward": 0.012, "time/upload": 0.0}
    several = {"time/data_max": 0.0001, "time/communication_min": 0.0, "time/slowest_rank": 2, "time/spread": 0.005}
    assert grouped(step) == grouped(step | several) == {"time": "20 ms a step  backward 60%, forward 30%"}
    assert grouped(step | several | {"time/spread": 0.12, "time/mine": 3.0}) == {
        "time": "20 ms a step  backward 60%, forward 30%  rank 2 is the slowest, by 12%  mine 3"
    }
    assert grouped({"time/step": 0.0}) == {"time": "0 ms a step"}
    assert grouped({"time/mine": 3.0, **step}) == {"time": "20 ms a step  backward 60%, forward 30%  mine 3"}
    assert grouped({"time/step": 12.0}) == {"time": "12 s a step"}
    assert grouped({"time/data": 0.5}) == {"time": "data 0.5"}


def test_a_resume_that_makes_no_step_keeps_the_numbers_of_the_run(tmp_path):
    file = tmp_path / "summary.json"
    assert earlier(tmp_path, 4) == {}
    file.write_text(json.dumps({"steps": 4, "train/loss": 1.5, "perf/mfu": None, "val/loss": 2.0, "ranks": 3}))
    assert earlier(tmp_path, 4) == {"train/loss": 1.5}
    assert earlier(tmp_path, 5) == {}


@pytest.mark.parametrize(
    ("error", "place"),
    [(ValueError("a"), "in step 3, on sample 1, sample 2"), (RuntimeError("[gloo/transport/tcp] Timed out"), None)],
)
def test_samples_are_named_unless_a_collective_has_failed(error: Any, place: str | None) -> None:
    source = SimpleNamespace(where=lambda ref: f"sample {ref}")
    error.refs = [1, 2]
    tell_place(error, SimpleNamespace(batch=4, plan=SimpleNamespace(micro=2, source=source), rehearsing=False, step=2))
    assert getattr(error, "place", None) == place and error.given == "batch=4, micro_batch=2"


@pytest.mark.parametrize("name", ["plain", "a b", "$(touch x);`y`'q", 'a"b', "back\\slash", "-r", "a,b", "[x]", '\\"'])
def test_a_printed_command_can_be_typed_whatever_the_name_of_the_run(name, tmp_path):
    """Hydra's own parser and the shell's rules read the words back."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    word = shlex.split(go_on(["recipe=toy"], Path("ckpt", name)))[-1]
    assert OverridesParser.create().parse_override(word).value() == f"ckpt/{name}"
    folder = Path(name)
    folder.mkdir()
    (folder / "config.yaml").write_text("batch: 1")
    typed = shlex.split(resume(SimpleNamespace(run_dir=folder, command=Command([]))))[-1]
    assert Path(typed) == folder and not typed.startswith("-")
