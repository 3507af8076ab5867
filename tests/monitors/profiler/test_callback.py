"""Traces of real runs: their steps, their regions, and the run beside them, which must not notice."""

import gzip
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.runs import make
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.compile import Compile
from trainer.callbacks.ema import EMA
from trainer.callbacks.overlap import Overlap
from trainer.callbacks.pipeline import PipelineParallel
from trainer.callbacks.shard import Shard
from trainer.comm.phases import running
from trainer.errors import ConfigError
from trainer.monitors.profiler.callback import Profiler
from trainer.monitors.profiler.recording import Recording
from trainer.monitors.step_timer import StepTimer
from trainer.optim.factories import adamw
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")

PHASES = {"data", "forward", "backward", "optimizer", "callbacks", "checkpoint"}


def events(step: int, rank: int = 0, run: str = "r") -> list[dict[str, Any]]:
    with gzip.open(f"runs/{run}/profile/rank{rank}/step-{step}.json.gz") as file:
        return json.load(file)["traceEvents"]


def regions(step: int, rank: int = 0, run: str = "r") -> set[str]:
    return {event["name"] for event in events(step, rank, run) if event.get("cat") == "user_annotation"}


def files(rank: int = 0, run: str = "r") -> list[str]:
    return sorted(path.name for path in Path(f"runs/{run}/profile/rank{rank}").glob("*"))


def said(messages: list[str]) -> list[str]:
    return [text for text in messages if text.startswith("profiler")]


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"first": 0}, "callbacks.profiler.first=0: must be at least 1"),
        ({"active": 0}, "callbacks.profiler.active=0: must be at least 1"),
        ({"ranks": []}, "callbacks.profiler.ranks=[]: no rank would record; name some, or null for all"),
        ({"ranks": [0, -1]}, "callbacks.profiler.ranks.1=-1: must be at least 0"),
        ({"every": 2}, "callbacks.profiler.every=2: is less than active=3, so recordings would overlap; raise it"),
    ],
)
def test_refused(knobs, reason):
    with pytest.raises(ConfigError) as caught:
        Profiler(**knobs)
    assert str(caught.value) == reason


def test_ranks_that_the_run_has_not_are_named(messages):
    trainer: Any = SimpleNamespace(plan=SimpleNamespace(max_steps=20), step=0, world=2)
    Profiler(ranks=[1]).on_fit_start(trainer)
    assert said(messages) == []
    Profiler(ranks=[1, 2, 7]).on_fit_start(trainer)
    assert said(messages) == [
        "profiler: no trace of rank 2, 7, since the run has ranks 0 to 1; give another callbacks.profiler.ranks"
    ]


def test_a_trace_has_its_steps_with_phases_and_callbacks(messages):
    """The second recording ends with the run."""
    callbacks = {"profiler": Profiler(first=2, active=2, every=4), "mine": EMA(decay=0.5)}
    make(callbacks=callbacks, max_steps=6, clip_norm=1.0, checkpoint={"every_steps": 3}).fit()
    assert files() == ["step-2.json.gz", "step-6.json.gz", "summary.txt"]
    steps = {name for name in regions(2) if name.startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    assert regions(2) >= PHASES | {"mine.on_step_end"} and "ProfilerStep#6" in regions(6)
    names = [event["name"] for event in events(2)]
    assert [names.count(name) for name in ("data", "forward", "backward", "optimizer")] == [2, 2, 2, 2]
    table = Path("runs/r/profile/rank0/summary.txt").read_text()
    assert table.count("Steps ") == 2 and "aten::" in table and "mine.on_step_end" in table
    line = said(messages)[0]
    assert line.startswith("profiler: steps 2 to 3 are in runs/r/profile/rank0/step-2.json.gz; most time: ")


class Ends(Callback):
    """Sends this process a signal after a step, or raises."""

    def __init__(self, step: int, trouble: str) -> None:
        self.step, self.trouble = step, trouble

    def on_step_end(self, trainer) -> None:
        if trainer.step != self.step:
            return
        if self.trouble == "raise":
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("trouble", ["signal", "raise"])
def test_an_end_in_the_middle_closes_the_trace(trouble):
    trainer = make(callbacks={"profiler": Profiler(first=2, active=4), "ends": Ends(3, trouble)}, max_steps=8)
    if trouble == "raise":
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
    else:
        trainer.fit()
        assert trainer.stop_reason == "signal"
    assert files() == ["step-2.json.gz", "summary.txt"] and "ProfilerStep#3" in regions(2)
    assert running.clock is None


def test_a_validation_ends_a_recording():
    make(callbacks={"profiler": Profiler(first=2, active=5)}, max_steps=8, validate_every=4).fit()
    steps = {name for name in regions(2) if name.startswith("Profiler")}
    assert steps == {f"ProfilerStep#{step}" for step in (2, 3, 4)}


def test_a_resume_records_what_begins_after_it(messages):
    make(callbacks={"profiler": Profiler(first=2, active=1, every=3)}, max_steps=4).fit()
    assert files() == ["step-2.json.gz", "summary.txt"]
    make(callbacks={"profiler": Profiler(first=2, active=1, every=3)}, max_steps=6, resume="auto").fit()
    assert files() == ["step-2.json.gz", "step-5.json.gz", "summary.txt"]
    messages.clear()
    make(callbacks={"profiler": Profiler(first=2)}, max_steps=7, resume="auto").fit()
    (line,) = said(messages)
    assert line == (
        "profiler: no step is recorded, since the run goes from step 7 to 7; give another callbacks.profiler.first"
    )


class Refuses:
    """Of kineto: at the start, at the stop, or of the file, of which it writes a part."""

    def __init__(self, where: str, monkeypatch) -> None:
        def refuse(*_: Any) -> None:
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED\nmore")

        def part(_: Any, path: str) -> None:
            Path(path).write_text('{"traceEvents": [{"ph"')

        name = {"start": "start", "stop": "stop", "file": "export_chrome_trace"}[where]
        monkeypatch.setattr(torch.profiler.profile, name, part if where == "file" else refuse)


REFUSALS = {
    "start": "profiler: step 2 is not recorded: RuntimeError: CUPTI_ERROR_NOT_INITIALIZED more",
    "stop": "profiler: the steps from 2 have no trace: RuntimeError: CUPTI_ERROR_NOT_INITIALIZED more",
    "file": "profiler: the steps from 2 have no trace: OSError: kineto could not write the whole trace; make room on "
    "the disk",
}


@pytest.mark.parametrize("where", REFUSALS)
def test_a_refusal_is_one_line_and_the_run_goes_on(where, messages, monkeypatch):
    with monkeypatch.context() as patch:
        Refuses(where, patch)
        trainer = make(callbacks={"profiler": Profiler(first=2, active=1)}, max_steps=4)
        trainer.fit()
    if where == "stop":
        torch.autograd._disable_profiler()  # what the faked stop has not done
    assert trainer.step == 4 and said(messages) == [REFUSALS[where]]
    assert files() == [] and running.clock is None


def test_a_folder_that_can_not_be_made_is_one_line(messages):
    trainer = make(callbacks={"profiler": Profiler(first=2, active=1)}, max_steps=4)
    Path("runs/r/profile").write_text("in the way")
    trainer.fit()
    assert trainer.step == 4
    assert said(messages) == [
        "profiler: step 2 is not recorded: NotADirectoryError: [Errno 20] Not a directory: 'runs/r/profile/rank0'"
    ]


@pytest.mark.parametrize("memory", [False, True])
def test_shapes_stacks_and_memory_on_demand(memory):
    knobs = {"record_shapes": True, "with_stack": True, "profile_memory": memory}
    make(callbacks={"profiler": Profiler(first=2, active=1, **knobs)}, max_steps=3).fit()
    found = events(2)
    assert any("Input Dims" in event.get("args", {}) for event in found)
    assert any("forward_backward.py" in event["name"] for event in found if event.get("cat") == "python_function")
    assert any(event["name"] == "[memory]" for event in found) == memory


def test_the_time_of_writing_is_the_callbacks_and_no_wait_for_data(monkeypatch):
    """By a clock that goes on only while the files are written."""
    clock, write = [0.0], Recording.write

    def written(self: Recording) -> str:
        clock[0] += 1.0
        return write(self)

    monkeypatch.setattr(Recording, "write", written)
    timer = StepTimer()
    timer.now = lambda: clock[0]
    make(callbacks={"profiler": Profiler(first=2, active=1), "timer": timer}, max_steps=4, log_every_steps=1).fit()
    times = [json.loads(line)["ranks"][0] for line in Path("runs/r/step_times.jsonl").read_text().splitlines()]
    assert [each["data"] for each in times] == [0.0] * 4
    assert [each["callbacks"] for each in times] == [0.0, 0.0, 1.0, 0.0]


SETS: dict[str, Any] = {
    "plain": dict,
    "overlap": lambda: {"overlap": Overlap()},
    "shard": lambda: {"shard": Shard(2)},
    "compile": lambda: {"compile": Compile(backend="aot_eager")},
    "pipeline": lambda: {"pipeline": PipelineParallel(stages=3, schedule="gpipe")},
}


def train(place: Place, name: str, profiled: bool, ranks: list[int] | None = None) -> tuple[bytes, float]:
    callbacks = SETS[name]()
    if profiled:
        callbacks["profiler"] = Profiler(first=2, active=2, ranks=ranks)
    depth = 3 if name == "pipeline" else 2
    run = f"{name}-{profiled}"
    place = Place(place.rank, place.world, place.local_rank, place.local_world, f"{place.store}-{run}", "test")
    trainer = make(
        Toy(depth=depth), callbacks, adamw, place=place, max_steps=4, run_dir=f"runs/{run}", log_every_steps=1,
        checkpoint={"every_steps": 2},
    )  # fmt: skip
    trainer.fit()
    bits = b"".join(p.detach().numpy().tobytes() for p in trainer.parameters)
    return bits, trainer.last_metrics.get("compile/recompiles", 0.0)


def both(place: Place, name: str) -> bool:
    """Whether the bits are the same with a profiler, and nothing was compiled again."""
    plain, profiled = (train(place, name, on) for on in (False, True))
    return plain == profiled and profiled[1] == 0.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("plain", "overlap") else pytest.mark.slow) for name in SETS]
)
def test_on_three_ranks_the_bits_are_the_same_and_each_rank_has_a_folder(name):
    assert run_ranks(3, both, name) == [True] * 3
    run = f"{name}-True"
    for rank in range(3):
        assert files(rank, run) == ["step-2.json.gz", "summary.txt"]
        steps = {"ProfilerStep#2", "ProfilerStep#3"}
        assert regions(2, rank, run) >= PHASES | {"communication"} | steps, rank
        assert any(event["name"].startswith("gloo:") for event in events(2, rank, run))
    if name == "overlap":
        assert "overlap.on_flush" in regions(2, 0, run)


def one(place: Place) -> int:
    return len(train(place, "plain", True, [1])[0])


def test_only_the_named_ranks_record():
    assert min(run_ranks(3, one)) > 0
    assert [path.name for path in Path("runs/plain-True/profile").iterdir()] == ["rank1"]
