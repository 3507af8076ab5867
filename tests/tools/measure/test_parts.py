"""A part that can't be measured is a line, and the others go on; on several ranks all have the same report."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from trainer.comm.ranks import Ranks
from trainer.cost.machine import CodecCost
from trainer.process.environment import Place
from trainer.tools.measure import codecs, device, host
from trainer.tools.measure.parts import PARTS
from trainer.tools.measure.report import Report


def options(**given: Any) -> argparse.Namespace:
    made = {
        "collectives": ("all_reduce",),
        "max_mib": 1,
        "seconds": 0.001,
        "folder": Path(),
        "disk_mib": 1,
        "shards": [],
    }
    return argparse.Namespace(**{**made, **given})


@pytest.mark.parametrize("part", ["disk", "shards"])
def test_a_folder_that_can_not_be_written_is_a_line(part: str, tmp_path: Path) -> None:
    report, missing = Report(shows=False), tmp_path / "none"
    PARTS[part](Ranks(Place(), "cpu", "gloo", 60), options(folder=missing), report)
    (line,) = report.missed
    assert line.startswith(f"{part}: not measured: {missing}") and line.endswith("No such file or directory")
    assert part not in report.numbers


def test_shards_that_are_missing_are_a_line(tmp_path: Path) -> None:
    report = Report(shows=False)
    PARTS["shards"](
        Ranks(Place(), "cpu", "gloo", 60), options(folder=tmp_path, shards=[str(tmp_path / "x-*.tar")]), report
    )
    assert report.missed[0].startswith("shards: not measured: ") and "x-*.tar" in report.missed[0]


def test_copies_need_a_gpu() -> None:
    report = Report(shows=False)
    PARTS["copies"](Ranks(Place(), "cpu", "gloo", 60), options(), report)
    assert report.missed == ["copies: not measured: there is no GPU to copy to"]


class Two(Ranks):
    """Rank 0 of two ranks, whose other one has gathered something else."""

    def __init__(self, other: dict[str, Any], why: str = "") -> None:
        self.device, self.other = torch.device("cpu"), [other, why]

    def gather(self, value: Any, group: Any = None) -> list[Any]:
        return [value, self.other]


def test_a_number_that_a_rank_lacks_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "matmul", lambda _: {"fp32_flop_per_s": 1.0, "bf16_flop_per_s": 2.0})
    report = Report(shows=False)
    PARTS["matmul"](Two({"fp32_flop_per_s": 3.0, "fp16_flop_per_s": 4.0}), options(), report)
    assert report.numbers == {"matmul": {"fp32_flop_per_s": 2.0}}
    assert report.missed == [
        "matmul, bf16_flop_per_s: not measured: rank 1 can't", "matmul, fp16_flop_per_s: not measured: rank 0 can't"
    ]  # fmt: skip


def test_memory_that_runs_out_on_any_rank_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> dict[str, CodecCost]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nSee the documentation.")

    monkeypatch.setattr(device, "matmul", lambda _: {"fp32_flop_per_s": 1.0})
    monkeypatch.setattr(codecs, "measure", fails)
    report = Report(shows=False)
    PARTS["codecs"](Two({"bf16": [1.0, 2.0]}), options(), report)
    PARTS["matmul"](Two({}, "out of memory"), options(), report)
    assert not report.numbers and not report.codecs and report.missed == [
        "codecs: not measured: rank 0: CUDA out of memory. Tried to allocate 1 GiB.",
        "matmul: not measured: rank 1: out of memory",
    ]  # fmt: skip


def together(place: Place, folder: str, quiet: float) -> tuple[Any, ...]:
    """Each rank has costs and rates of its own; the report has the means."""
    with pytest.MonkeyPatch.context() as patch:
        own = 1.0 + place.rank
        patch.setattr(codecs, "measure", lambda *_: {"bf16": CodecCost(own, 2 * own)})
        patch.setattr(device, "matmul", lambda _: {"fp32_flop_per_s": own})
        patch.setattr(host, "QUIET", quiet)
        ranks, report = Ranks(place, "cpu", "gloo", 60), Report(shows=False)
        for part in ("links", "codecs", "matmul", "disk", "shards"):
            PARTS[part](ranks, options(folder=Path(folder), shards=["none.tar"], seconds=1e-7), report)
        ranks.close()
    return report.fits, report.codecs, report.numbers, report.missed, {row.estimated for row in report.rows}


def test_all_ranks_have_one_report(tmp_path: Path) -> None:
    one, other = run_ranks(2, together, str(tmp_path), 2.0)
    assert one == other
    fits, costs, numbers, missed, estimated = one
    assert estimated == {True}
    assert fits.keys() == {("inside", "all_reduce")}
    assert costs == {"bf16": CodecCost(1.5, 3.0)}
    assert numbers["matmul"] == {"fp32_flop_per_s": 1.5} and numbers["disk"]["write_bytes_per_s"] > 0
    across, slow, shards = missed
    assert across == "across: not measured: there is one node"
    assert slow.endswith(" bytes: not measured: a call takes longer than --seconds=1e-07")
    assert shards.startswith("shards: not measured: ") and "none.tar" in shards
    assert not torch.distributed.is_initialized()


def test_interrupts_can_not_be_told_on_a_busy_machine(tmp_path: Path) -> None:
    *_, missed, estimated = run_ranks(2, together, str(tmp_path), -1.0)[0]
    assert estimated == {False}
    (line,) = [line for line in missed if line.startswith("CPU us: ")]
    assert line.startswith("CPU us: without interrupts, which no process can see: the machine's processors were ")
    assert line.endswith("% busy before; measure on an idle machine")
