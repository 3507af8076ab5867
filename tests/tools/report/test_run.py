"""Folders of runs that are whole, unfinished, crashed, resumed, damaged or a stranger's."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from support.messages import refuses
from support.run_files import synthetic_run, write_lines

from trainer.errors import ConfigError
from trainer.tools.compare import compare
from trainer.tools.export import read_config as exported
from trainer.tools.report.__main__ import report
from trainer.tools.report.run import (
    MOST_EVENTS,
    MOST_KEYS,
    best_of,
    differences,
    names_of,
    read_config,
    read_events,
    read_run,
)
from trainer.tools.resume import read as stored


def test_a_whole_run(tmp_path):
    run = read_run(synthetic_run(tmp_path / "r"), "r", 1000)
    assert (run.state, run.error, run.notes, run.last_step) == ("finished", "", [], 10_000)
    assert run.ranks.ranks == 4 and len(run.exchanges) == 3 and len(run.advice) == 1
    assert [event["event"] for event in run.events] == ["start", *["checkpoint"] * 4, "skip", "restart", "stop"]
    assert run.config == {"batch": 256, "optimizer.lr": 1e-3, "trainer.max_steps": 10_000, "trainer.seed": 0}


@pytest.mark.parametrize(
    "events, summary, state",
    [
        (["start"], None, "running or killed"),
        (["start", "stop"], "max_steps", "finished"),
        (["start", "stop"], None, "finished"),
        (["start", "stop"], "signal", "stopped by a signal"),
        (["start", "stop"], "early_stop: val/loss", "finished: early_stop: val/loss"),
        (["start", "stop", "resume"], "max_steps", "running or killed"),  # the summary is of the attempt before
        (["start", "crash"], None, "crashed"),
        (["start", "crash"], "error", "crashed"),
        (["start", "crash", "restart", "stop"], "max_steps", "finished"),
        ([], None, "running or killed"),
        ([], "max_steps", "finished"),
    ],
)
def test_how_a_run_ended(tmp_path, events, summary, state):
    facts = {"stop": {"reason": "max_steps"}, "crash": {"error": "RuntimeError: no"}}
    write_lines(tmp_path / "events.jsonl", [{"step": 1, "event": event, **facts.get(event, {})} for event in events])
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps({"stopped": summary}))
    run = read_run(tmp_path, "r", 10)
    assert run.state == state
    assert run.error == ("RuntimeError: no" if state == "crashed" else "")


def test_each_missing_file_is_one_line(tmp_path):
    folder = synthetic_run(tmp_path / "r")
    for name in ("config.yaml", "summary.json", "events.jsonl", "step_times.jsonl", "comm.jsonl", "advice.jsonl"):
        (folder / name).unlink()
    notes = ["config.yaml: is missing", "summary.json: is missing", "events.jsonl: is missing"]
    assert read_run(folder, "r", 10).notes == notes  # the others need callbacks that a run may not have
    (folder / "metrics.jsonl").unlink()
    with refuses("RUN", "holds", "metrics.jsonl"):
        read_run(folder, "r", 10)
    with pytest.raises(ConfigError, match="is no folder; give the folder of a run"):
        read_run(tmp_path / "none", "r", 10)


def test_a_folder_without_permission_is_one_line(tmp_path, monkeypatch):
    folder, stat = synthetic_run(tmp_path / "r"), Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.parent == folder:  # mode 700 of another user; tests may run as root
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    for read in (
        lambda: report([folder], None, False),
        lambda: compare([folder], False, False),
        lambda: stored(folder),
    ):
        with pytest.raises(ConfigError, match=f"^RUN={folder}: can't be read: Permission denied; give a folder that"):
            read()


def test_values_that_are_not_finite_are_one_line(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "train/loss": None if n > 2 else 1.0} for n in range(1, 6)])
    assert "train/loss: 3 of 5 values are not finite" in read_run(tmp_path, "r", 10).notes


def test_failures_that_the_launcher_saw(tmp_path):
    write_lines(tmp_path / "events.jsonl", [{"step": 0, "event": "start"}])
    lines = [{"time": 5.0, "attempt": 0, "rank": 1, "step": 7, "failed": "Traceback\n  File x\nRuntimeError: <b>"}]
    lines += [{"time": 6.0, "attempt": 1, "rank": 0, "step": None, "failed": "killed"}, {"step": 1}]
    write_lines(tmp_path / "logs" / "events.jsonl", lines)
    failures = read_events(tmp_path)[0][1:]
    assert [(event["step"], event["error"]) for event in failures] == [(7, "RuntimeError: <b>"), (0, "killed")]


def test_the_oldest_of_many_events_are_left_out(tmp_path):
    many = [{"step": n, "event": "checkpoint"} for n in range(MOST_EVENTS + 5)]
    write_lines(tmp_path / "events.jsonl", [{"step": 0, "event": "start"}, *many])
    events, note = read_events(tmp_path)
    assert [event["step"] for event in events[:2]] == [0, 5] and len(events) == MOST_EVENTS + 1
    assert note == "events.jsonl: the 5 oldest events are left out"


def test_secrets_of_a_config_are_hidden(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {hf_token: abc, url: 'https://me:pw@host/x'}\n")
    keys, note = read_config(tmp_path / "config.yaml")
    assert keys == {"data.hf_token": "***", "data.url": "https://***@host/x"} and note == ""


@pytest.mark.parametrize("node", ["{{x: *a{0}, y: *a{0}}}", "[*a{0}, *a{0}]"])
def test_a_config_that_multiplies_itself(tmp_path, node):
    """Anchors that double at each level: a billion leaves, if they were all followed. No command follows them."""
    levels = "\n".join(f"a{n}: &a{n} {node.format(n - 1)}" for n in range(1, 40))
    (tmp_path / "config.yaml").write_text(f"a0: &a0 {{x: 1, y: 2}}\n{levels}\n")
    reason = "has aliases (*NAME), which no run writes"
    assert read_config(tmp_path / "config.yaml") == ({}, f"config.yaml: can't be read ({reason})")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        stored(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        exported(tmp_path / "config.yaml", [], "key", {})


def test_many_keys(tmp_path):
    (tmp_path / "config.yaml").write_text("".join(f"a{n}: 1\n" for n in range(MOST_KEYS + 1)))
    keys, note = read_config(tmp_path / "config.yaml")
    assert len(keys) == MOST_KEYS and "the others are left out" in note


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "logs/events.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    (tmp_path / "logs").mkdir()
    (tmp_path / "summary.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    for read in (lambda: read_run(tmp_path, "r", 1), lambda: stored(tmp_path)):
        with pytest.raises(ConfigError, match=f"{Path(name).name} is a pipe, a socket or a device"):
            read()


@pytest.mark.parametrize("text", ["a: [", "- 1", "!!python/object/apply:os.system ['true']", "\x00"])
def test_no_config(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    keys, note = read_config(tmp_path / "config.yaml")
    assert keys == {} and note.startswith("config.yaml: can't be read (")


def test_names_tell_runs_apart(tmp_path):
    a, b, c = tmp_path / "x" / "r", tmp_path / "y" / "r", tmp_path / "y" / "s"
    assert names_of([a]) == ["r"]
    assert names_of([b, c]) == ["r", "s"]
    assert names_of([a, b]) == ["x/r", "y/r"]
    assert names_of([a, a]) == ["r", "r"]


def test_keys_that_differ(tmp_path):
    runs = [
        read_run(synthetic_run(tmp_path / str(lr), 20, lr=lr, **more), "r", 10) for lr, more in ((1, {}), (2, {"x": 0}))
    ]
    assert differences(runs) == {"optimizer.lr": [1, 2], "x": [None, 0]}


def test_the_best_value_needs_a_direction(tmp_path):
    lines = [
        {"step": n, **dict.fromkeys(("val/loss", "val/accuracy", "val/mine", "val/cost"), v)}
        for n, v in ((1, 5.0), (2, 3.0))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    (tmp_path / "summary.json").write_text('{"best": {"metric": "max val/mine", "value": 5.0, "step": 1}}')
    run = read_run(tmp_path, "r", 10)
    assert [best_of(run, name) for name in run.metrics] == [(3.0, 2), (5.0, 1), (5.0, 1), None]


@pytest.mark.parametrize(
    "name", ["gpu/power_w", "train/loss_scale", "train/lr", "host/errors_lost", "loss/temperature"]
)
def test_a_part_of_a_name_gives_no_direction(tmp_path, name):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, name: 5.0}, {"step": 2, name: 3.0}])
    assert best_of(read_run(tmp_path, "r", 10), name) is None


@pytest.mark.parametrize(("name", "value"), [("val/word_wer", 3.0), ("val/masked_loss", 3.0), ("val/Dice_1", 5.0)])
def test_a_whole_word_gives_the_direction(tmp_path, name, value):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, name: 5.0}, {"step": 2, name: 3.0}])
    best = best_of(read_run(tmp_path, "r", 10), name)
    assert best is not None and best[0] == value
