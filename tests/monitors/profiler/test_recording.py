"""What a recording replaces while it lasts, operators in their phases, and files that the disk does not take."""

import gzip
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.runs import make

from trainer.callback import Callback
from trainer.comm.phases import running
from trainer.monitors.profiler.callback import Profiler
from trainer.monitors.profiler.recording import Recording, ends_whole
from trainer.monitors.step_timer import StepTimer

pytestmark = pytest.mark.usefixtures("tmp_path")


def events(step: int) -> list[dict[str, Any]]:
    with gzip.open(f"runs/r/profile/rank0/step-{step}.json.gz") as file:
        return json.load(file)["traceEvents"]


def test_operators_lie_inside_their_phase():
    make(callbacks={"profiler": Profiler(first=2, active=1)}, max_steps=3).fit()
    spans = {e["name"]: e for e in events(2) if e.get("cat") == "user_annotation"}
    operators = [e for e in events(2) if e.get("cat") == "cpu_op"]

    def within(phase: str) -> set[str]:
        begin, end = spans[phase]["ts"], spans[phase]["ts"] + spans[phase]["dur"]
        return {e["name"] for e in operators if begin <= e["ts"] <= e["ts"] + e["dur"] <= end}

    assert "aten::linear" in within("forward") and "aten::linear" not in within("backward")
    assert any("Backward" in name for name in within("backward"))
    assert not any("Backward" in name for name in within("forward"))


def test_the_first_step_of_all_is_recorded_too():
    make(callbacks={"profiler": Profiler(first=1, active=1)}, batch=12, max_steps=2).fit()
    names = [event["name"] for event in events(1)]
    assert [names.count(name) for name in ("data", "forward", "backward", "optimizer")] == [1, 1, 1, 1]


def functions(trainer: Any) -> list[Any]:
    return [{hook: list(calls) for hook, calls in trainer.hooks.items()}, dist.Work.wait, running.clock]


class Look(Callback):
    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def on_step_end(self, trainer) -> None:
        self.seen[trainer.step] = functions(trainer)


def test_outside_of_the_recorded_steps_nothing_is_replaced():
    look = Look()
    trainer = make(callbacks={"profiler": Profiler(first=2, active=2), "look": look}, max_steps=5)
    trainer.fit()
    assert look.seen[1] == look.seen[4] == look.seen[5] == functions(trainer)
    assert all(now != plain for now, plain in zip(look.seen[2], look.seen[1], strict=True))


def test_a_clock_that_runs_anyway_goes_on(monkeypatch):
    """The timer's parts add up to the time of the run, of which some steps are recorded."""
    look, clocks = Look(), list[tuple[Any, Any]]()
    now: Any = running
    monkeypatch.setattr(look, "on_step_end", lambda trainer: clocks.append((now.clock, now.clock.listener)))
    callbacks = {"profiler": Profiler(first=2, active=2), "timer": StepTimer(), "look": look}
    trainer = make(callbacks=callbacks, max_steps=5, log_every_steps=1)
    trainer.fit()
    assert len({id(clock) for clock, _ in clocks}) == 1
    assert [listener is not None for _, listener in clocks] == [False, True, True, False, False]
    names = [event["name"] for event in events(2)]
    assert [names.count(name) for name in ("data", "forward", "backward", "optimizer")] == [2, 2, 2, 2]
    assert trainer.last_metrics["time/forward"] > 0 and running.clock is None


def test_a_disk_that_is_full_leaves_no_part_of_a_trace(monkeypatch):
    write = Recording.write

    def limited(self: Recording) -> str:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
        try:
            return write(self)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(Recording, "write", limited)
    trainer = make(callbacks={"profiler": Profiler(first=2, active=1)}, max_steps=3)
    trainer.fit()
    assert trainer.step == 3 and list(Path("runs/r/profile/rank0").iterdir()) == []
    assert "the steps from 2 have no trace: OSError: " in Path("runs/r/logs/rank0.log").read_text()


@pytest.mark.parametrize(("content", "whole"), [("{}\n", True), ('{"a": [', False), ("", False)])
def test_ends_whole(content, whole, tmp_path):
    (tmp_path / "file").write_text(content)
    assert ends_whole(tmp_path / "file") == whole


@pytest.mark.parametrize("other", [False, True])
def test_on_a_gpu_memory_is_a_snapshot(other, monkeypatch):
    """If another callback records the history of allocations already, that goes on."""
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: other, raising=False)  # a CPU build lacks it
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **_: calls.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    trainer = make(max_steps=1)
    recording = Recording(trainer, 7, 1, False, False, True)
    recording.cuda = True
    recording.start(lambda: None)
    recording.stop()
    trainer.close()
    snapshot = "runs/r/profile/rank0/memory-7.pickle"
    assert calls == ([snapshot] if other else ["all", snapshot, None])


def test_what_is_replaced_is_put_back_though_kineto_does_not_stop(monkeypatch):
    trainer = make(max_steps=1)
    before = functions(trainer)
    recording = Recording(trainer, 1, 1, False, False, False)
    recording.start(lambda: None)
    stop = recording.profile.stop
    monkeypatch.setattr(recording.profile, "stop", lambda: (stop(), 1 / 0))
    assert functions(trainer) != before
    with pytest.raises(ZeroDivisionError):
        recording.stop()
    assert functions(trainer) == before
    trainer.close()
