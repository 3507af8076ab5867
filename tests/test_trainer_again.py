"""A second `fit`: the bits of a run that was never interrupted, or one line that says why not."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.callbacks import CHANGES, CODECS, OBSERVERS, name_of
from support.messages import refuses
from support.ranks import run_ranks
from support.runs import sgd
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.loggers.metrics_file import MetricsFile
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

ALL = {**OBSERVERS, **CHANGES, **CODECS}
STAGED = ("pipeline", "pipeline.2bw")
DEFAULT = ("overlap", "shard.3")  # deferred gradients, parts of the model


class Last(Callback):
    """Keeps what the validated weights are, while the ranks are together."""

    def on_validation_end(self, trainer, metrics) -> None:
        self.metrics = dict(metrics)

    def on_step_end(self, trainer) -> None:
        self.losses = [*getattr(self, "losses", []), trainer.metrics["train/loss"]]


def make(place: Place | None = None, rows: tuple[str, ...] = (), run: str = "r", **options: Any) -> Trainer:
    callbacks = {**{name_of(row): ALL[row]() for row in rows}, "last": Last()}
    recipe = Toy(samples=40, width=32, depth=3 if set(rows) & set(STAGED) else 2, dtype="float64")
    options = {
        "max_steps": 3,
        "log_every_steps": 1,
        "validate_every": 3,
        "run_dir": f"runs/{run}",
        "checkpoint": CheckpointOptions(),
    } | options
    return Trainer(
        recipe, callbacks, adamw if "onebit_adam" in rows else sgd, batch=12, options=Options(**options),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4), place=place or Place(),
    )  # fmt: skip


def straight_and_again(place: Place, rows: tuple[str, ...]) -> tuple[Any, Any]:
    """Losses and last metrics of 6 steps, and of 3 and then 3 more."""
    name = "-".join(rows).replace(" ", "-") or "plain"
    straight = make(replace(place, store=f"{place.store}-{name}"), rows, f"{name}-straight", max_steps=6)
    straight.fit()
    again = make(replace(place, store=f"{place.store}-{name}-again"), rows, name)
    assert again.fit()["steps"] == 3
    summary = again.fit(max_steps=6)
    assert (summary["steps"], summary["stopped"]) == (6, "max_steps")
    last = [trainer.callbacks["last"] for trainer in (straight, again)]
    return tuple((each.losses, each.metrics) for each in last)


@pytest.mark.parametrize("world", [1, 3])
def test_a_second_fit_has_the_bits_of_one_run(world):
    """The groups of three ranks have ended in between."""
    for straight, again in run_ranks(world, straight_and_again, ()):
        assert straight == again and len(straight[0]) == 6


@pytest.mark.parametrize("row", DEFAULT)
def test_callbacks_go_on_in_a_second_fit(row):
    for straight, again in run_ranks(3, straight_and_again, (row,)):
        assert straight == again


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ALL if row not in (*DEFAULT, "pipeline", "pipeline.2bw")])
def test_each_callback_goes_on_in_a_second_fit(row):
    rows = ("hierarchical", row) if row == "topk between nodes" else (row,)
    for straight, again in run_ranks(3, straight_and_again, rows):
        assert straight == again


def test_the_result_is_the_summary_on_every_rank():
    one, other = run_ranks(2, results)
    written = json.loads(Path("runs/r/summary.json").read_text())
    assert one == other == written
    assert written["steps"] == 3 and "val/loss" in written and "perf/samples_per_s" in written


def results(place: Place) -> dict[str, Any]:
    return make(place, ("throughput",)).fit()


def test_a_run_goes_on_in_its_own_files():
    trainer = Trainer(
        Toy(), [MetricsFile(), EMA()], batch=12, options=Options(max_epochs=0.5, log_every_steps=1, run_dir="runs/m"),
        data=DataOptions(workers=0),
    )  # fmt: skip
    assert trainer.fit()["steps"] == 4 and list(trainer.callbacks) == ["ema", "metrics_file"]
    trainer.fit(max_epochs=1)
    lines = [json.loads(line) for line in Path("runs/m/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["m"]


class Stops(Callback):
    def on_step_end(self, trainer) -> None:
        if trainer.step == 2:
            trainer.stop("enough")


def test_a_stopped_run_goes_on_to_its_planned_end():
    options = Options(max_steps=5, log_every_steps=1)
    trainer = Trainer(Toy(), [Stops()], batch=12, options=options, data=DataOptions(workers=0))
    assert trainer.fit()["steps"] == 2
    assert trainer.fit()["steps"] == 5


def test_a_second_fit_without_steps_says_so_and_changes_nothing(tmp_path):
    trainer = make()
    trainer.fit()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for limits in ({}, {"max_steps": 2}, {"max_epochs": 0.1}):
        with pytest.raises(
            ConfigError, match=r"^fit: the run is at step 3 of \d, so no step is left; give more, as in"
        ):
            trainer.fit(**limits)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert trainer.fit(max_steps=4)["steps"] == 4


def test_a_first_fit_has_the_limits_of_the_options():
    with refuses("fit", "Options(max_steps=N)"):
        make().fit(max_steps=4)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_steps": "6"}, r"max_steps\)=6: must be int or null, not str"),
        ({"max_steps": True}, r"max_steps\)=true: must be int or null, not bool"),
        ({"max_steps": -1}, r"max_steps\)=-1: must be at least 0"),
        ({"max_epochs": float("inf")}, r"max_epochs\)=inf: must be less than inf"),
        ({"max_epochs": float("nan")}, r"max_epochs\)=nan: must be at least 0"),
    ],
)
def test_the_limits_of_a_further_fit_are_checked_as_those_of_the_options(limits, told):
    trainer = make(max_steps=1)
    trainer.fit()
    with pytest.raises(ConfigError, match=rf"^fit\({told}$"):
        trainer.fit(**limits)
    whole: Any = 2.0  # as 1e3 is
    assert trainer.fit(max_steps=whole)["steps"] == 2


def test_a_run_is_written_into_one_folder_though_the_current_one_changes(tmp_path, monkeypatch):
    relative, absolute = make(), make(run_dir=str(tmp_path / "x"), checkpoint=CheckpointOptions(str(tmp_path / "c")))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    told = f"since Trainer(), so the run would write into {tmp_path}/runs/r and {tmp_path}/elsewhere/runs/r; change"
    with pytest.raises(ConfigError, match=rf"^fit: .*{re.escape(told)}"):
        relative.fit()
    assert absolute.fit()["steps"] == 3 and not list(Path().iterdir())
    monkeypatch.chdir(tmp_path)
    assert relative.fit()["steps"] == 3


class Fails(Callback):
    def on_step_end(self, trainer) -> None:
        raise RuntimeError("trouble")


def test_a_failed_run_without_a_checkpoint_says_so():
    trainer = Trainer(Toy(), [Fails()], batch=12, options=Options(max_steps=2), data=DataOptions(workers=0))
    with pytest.raises(RuntimeError, match="trouble"):
        trainer.fit()
    with pytest.raises(ConfigError, match=r"^fit: ckpt/\S+ has no checkpoint to resume from; make another Trainer$"):
        trainer.fit()
