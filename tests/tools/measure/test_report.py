"""The report's JSON has what was added, and the machine has the links of the levels that there are."""

import json
import math

import pytest

from trainer.cost.machine import CodecCost, Link, from_json
from trainer.tools.measure.collectives import Row
from trainer.tools.measure.report import NO_LINK, Report

NEAR, FAR, ALL = Link(1e-5, 1e9, 1e-10), Link(1e-4, 1e7, 1e-9), Link(1e-4, 2e7, 1e-9)
ROW = Row("all", "all_reduce", 1024, 1e-3, 1.024e6, 1.536e6, 5e-4, True, 4)


def filled(*levels: tuple[str, Link]) -> Report:
    report = Report(shows=True)
    report.add_row(ROW)
    for level, link in levels:
        report.add_fit(level, "all_reduce", link)
    report.add_codecs({"bf16": CodecCost(1e-9, 0.0)})
    report.add_numbers("disk", {"write_bytes_per_s": 2e8, "read_bytes_per_s": 4e8})
    report.add_numbers("shards", {"samples_per_s": 1e3, "bytes_per_s": 5e6})
    report.add_numbers("matmul", {"bf16_flop_per_s": 2e12})
    report.miss("copies: not measured: there is no GPU to copy to")
    return report


def test_lines_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    filled(("all", ALL))
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "all_reduce 1024 1000.0 1.02 1.54 500.0",
        "all_reduce fit: latency 100.0 20.00",
        "bf16 1.000 0.000",
        "disk write 200.00 MB/s disk read 400.00 MB/s",
        "shards 1000.00 samples/s shards 5.00 MB/s",
        "matmul bf16 2.00 TFLOP/s",
        "copies: not measured: there is no GPU to copy to",
    ):
        assert text in out


def test_another_rank_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Report(shows=False).miss("a line")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("levels", "inside", "across"),
    [
        ([("inside", NEAR), ("across", FAR), ("all", ALL)], NEAR, FAR),
        ([("inside", NEAR)], NEAR, NO_LINK),
        ([("across", FAR)], NO_LINK, FAR),
        ([("all", ALL)], ALL, ALL),
        ([], NO_LINK, NO_LINK),
    ],
)
def test_the_machine_has_the_links_that_there_are(levels, inside, across) -> None:
    machine = filled(*levels).machine(4, 1.0, None, "gloo")
    assert (machine.inside, machine.across) == (inside, across)
    assert (machine.ranks, machine.disk_bytes_per_s) == (4, 2e8)


def test_json_has_everything_and_no_infinity() -> None:
    report = filled(("across", NO_LINK))
    text = json.dumps(report.as_json({"about": "x"}, report.machine(4, 1.0, 8e9, "nccl")), allow_nan=False)
    found = json.loads(text)
    assert found["collectives"][0] == {
        "level": "all", "collective": "all_reduce", "bytes": 1024, "seconds": 1e-3, "algbw": 1.024e6, "busbw": 1.536e6,
        "cpu_seconds": 5e-4, "estimated": True, "ranks": 4,
    }  # fmt: skip
    assert from_json(found["machine"]).across.bytes_per_s == math.inf
    link = {"latency_s": 0.0, "bytes_per_s": None, "cpu_s_per_byte": 0.0}
    assert found["fits"] == [{"level": "across", "collective": "all_reduce", **link}]
    assert found["disk"]["read_bytes_per_s"] == 4e8
    assert found["not_measured"] == ["copies: not measured: there is no GPU to copy to"]
