"""Decisions: those of a checkpoint, then those that were made after it, and no others."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.messages import refuses

from trainer.data.decisions import Decisions


def made(folder: Path, manifest: dict[str, Any] | None = None, rank: int = 0, **made_with: Any) -> Decisions:
    decisions = Decisions(folder / "splits.jsonl", rank, {"world": 3, **made_with})
    decisions.begin(manifest or {}, "mine", lambda value: value)
    return decisions


def test_what_was_decided_last_before_a_position_holds(tmp_path):
    decisions = made(tmp_path)
    assert decisions.at(0) is None
    for samples, position in ((0, 20), (30, 50), (40, 50), (60, 80)):
        decisions.add(samples, position, {"n": samples})
    assert [decisions.at(position) for position in (50, 79, 80, 99)] == [{"n": 40}, {"n": 40}, {"n": 60}, {"n": 60}]
    assert [one.samples for one in decisions.made] == [40, 60]  # no step needs the others any more
    decisions.close()


def test_a_resume_has_the_checkpoint_s_and_those_made_after_it(tmp_path):
    first = made(tmp_path)
    first.add(0, 20, {"n": 0})
    first.add(30, 50, {"n": 1})
    manifest = {"samples": 30, "decisions": {"mine": json.loads(json.dumps(first.state()))}}
    first.add(60, 90, {"n": 2})
    first.close()
    with (tmp_path / "splits.jsonl").open("a") as file:
        file.write('{"samples": 90, "posi')  # the process was killed
    again = made(tmp_path, manifest)
    assert [one.value["n"] for one in again.made] == [0, 1, 2]
    assert again.follows(30) and again.follows(60) and not again.follows(61)
    again.add(90, 120, {"n": 3})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "splits.jsonl").read_text().splitlines()]
    assert [line["n"] for line in lines] == [0, 1, 2, 3]
    elsewhere = made(tmp_path / "elsewhere", manifest)
    assert [one.value["n"] for one in elsewhere.made] == [0, 1]
    new = made(tmp_path)
    assert [one.value["n"] for one in new.made] == [0, 1, 2, 3]  # started again before its first checkpoint


def test_decisions_with_other_settings_are_dropped(tmp_path):
    first = made(tmp_path)
    first.add(0, 20, {"n": 0})
    manifest = {"samples": 30, "decisions": {"mine": first.state()}}
    first.add(60, 90, {"n": 2})
    first.close()
    other = made(tmp_path, manifest, world=2)
    assert other.made == [] and not other.follows(0)
    assert (tmp_path / "splits.jsonl").read_text().count("\n") == 2  # nothing is changed before the run decides
    other.add(30, 50, {"n": 7})
    other.close()
    assert [json.loads(line)["n"] for line in (tmp_path / "splits.jsonl").read_text().splitlines()] == [0, 7]


@pytest.mark.parametrize("samples", [0, 30])
def test_decisions_with_other_settings_at_the_same_step_are_dropped(samples, tmp_path):
    """A node was lost before the next checkpoint."""
    first = made(tmp_path)
    first.add(samples, samples + 20, {"n": 0})
    first.close()
    assert made(tmp_path, {"samples": samples}, world=2).made == []


def test_rank_0_writes_alone(tmp_path):
    decisions = made(tmp_path, rank=1)
    decisions.add(0, 20, {"n": 0})
    decisions.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [[1], [[1, 2]], [[1, "2", {}]], [[1, 2, 3]]])
def test_a_stranger_s_decisions_are_refused(wrong, tmp_path):
    manifest = {"samples": 30, "decisions": {"mine": {"made_with": {"world": 3}, "made": wrong}}}
    with refuses("trainer.resume", "decisions"):
        made(tmp_path, manifest)
