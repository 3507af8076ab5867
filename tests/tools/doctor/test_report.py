"""Findings of ranks: equal ones are one line, those that differ name their ranks, and the worst come last."""

import json

import pytest

from trainer.tools.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from trainer.tools.doctor.report import Merged, differences, document, in_words, lines, merge, verdict


def row(**values: str) -> list[Finding]:
    return [Finding(subject, value) for subject, value in values.items()]


def test_equal_findings_are_one_and_others_name_their_ranks():
    rows = {0: row(torch="2.13", disk="9 GiB"), 1: row(torch="2.13"), 2: row(torch="2.12")}
    merged = merge(rows)
    assert merged == [
        Merged(Finding("torch", "2.13"), (0, 1)), Merged(Finding("torch", "2.12"), (2,)),
        Merged(Finding("disk", "9 GiB"), (0,)),
    ]  # fmt: skip
    assert lines(merged, (0, 1, 2), (0,)) == [
        "ok       torch: 2.13  [ranks 0-1]", "ok       torch: 2.12  [rank 2]", "ok       disk: 9 GiB"
    ]  # fmt: skip


def test_numbers_for_programs_do_not_part_ranks():
    rows = {0: [Finding("memory", "8 GiB", data=1)], 1: [Finding("memory", "8 GiB", data={"free": 2})]}
    assert merge(rows) == [Merged(Finding("memory", "8 GiB"), (0, 1))]
    made = json.loads(json.dumps(document(merge(rows), rows)))
    assert made["ok"] and made["ranks"]["1"][0]["data"] == {"free": 2}
    assert made["findings"][0]["ranks"] == [0, 1]


def test_the_worst_is_said_last_and_decides():
    rows = {
        0: [Finding("a", "1", ERROR, "b", "c"), Finding("d", "2"), Finding("e", "3", WARNING), Finding("f", "4", NOTE)]
    }
    merged = merge(rows)
    assert [line.split()[0] for line in lines(merged, (0,))] == [OK, NOTE, WARNING, ERROR]
    assert lines(merged, (0,))[-1] == "error    a: 1; b; c"
    assert verdict(merged) == "1 error(s): training can't start; 1 warning(s)"
    assert verdict(merged[1:]) == "training can start; 1 warning(s), 1 note(s)"
    assert not document(merged, rows)["ok"]


def test_of_many_machines_the_terminal_shows_some_and_all_that_is_wrong():
    rows = {rank: [Finding("machine", f"node{rank}"), Finding("disk", f"{rank}", WARNING)] for rank in range(20)}
    shown = lines(merge(rows), tuple(range(20)))
    assert sum(line.startswith("ok       machine: node") for line in shown) == 8
    assert "ok       machine: 12 more values; --json FILE has all" in shown
    assert sum(line.startswith("warning") for line in shown) == 20


def test_what_must_be_equal_and_is_not():
    rows = {
        0: row(torch="2.13", Python="3.11", machine="a"),
        1: row(torch="2.13", Python="3.11", machine="b"),
        2: row(torch="2.12", machine="c"),
    }
    torch, python = differences(rows)
    assert torch.level == ERROR and torch.value == "2.13 (ranks 0-1) | 2.12 (rank 2)"
    assert python.level == NOTE and python.value == "3.11 (ranks 0-1) | missing (rank 2)"
    assert differences({0: rows[0], 1: rows[1]}) == []


def test_of_long_lists_the_words_that_differ():
    same = " ".join(f"NCCL_SETTING_{i}=value" for i in range(9))
    rows = {
        0: row(variables=f"{same} NCCL_DEBUG=INFO"),
        1: row(variables=f"NCCL_ALGO=Ring {same}"),
        2: row(variables=same),
    }
    (found,) = differences(rows)
    assert found.value == "NCCL_DEBUG=INFO (rank 0) | NCCL_ALGO=Ring (rank 1) | - (rank 2)"
    packages = {0: row(packages=f"a 1, {same}, numpy 2.1, z 2"), 1: row(packages=f"a 1, {same}, numpy 2.2, z 2")}
    assert differences(packages)[0].value == "numpy 2.1 (rank 0) | numpy 2.2 (rank 1)"


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2, 5, 7, 8], "ranks 0-2,5,7-8"), ([4, 2], "ranks 2,4")]
)
def test_ranks_in_words(ranks, words):
    assert in_words(ranks) == words
