"""Presets have the data sheets' numbers; a file is the bench's."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.costs import machine
from support.messages import refuses

from trainer.cost.machine import Link, to_json
from trainer.errors import ConfigError
from trainer.monitors.throughput import COLUMN, H100
from trainer.tools.measure.report import NO_LINK
from trainer.tools.scale.machines import PRESETS, find


def test_an_h100_has_the_peaks_of_the_throughput_monitor() -> None:
    tflops = PRESETS["8xh100-8x400g"].tflops
    assert [tflops[name] for name in ("bf16", "tf32", "fp32")] == [
        H100[COLUMN[name]] for name in ("bf16", "tf32", "fp32")
    ]


def test_presets_name_their_sources_and_grow() -> None:
    for cluster in PRESETS.values():
        assert "data sheet" in cluster.source and cluster.of(4).ranks == 4 * cluster.machine.ranks_per_node
        assert cluster.machine.inside.bytes_per_s > cluster.machine.across.bytes_per_s


def test_a_file_of_the_bench(tmp_path: Path) -> None:
    own = machine(8, 4, disk_bytes_per_s=math.inf)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": to_json(own), "collectives": []}))
    assert find(str(path)).machine == own and find(str(path)).of(3).ranks == 12


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (Link(1e-6, 5e9, 0.0), "links: one node was measured, so between nodes the link inside is taken"),
        (NO_LINK, "links: one rank was measured, so communication takes no time"),
    ],
)
def test_a_bench_of_one_node_has_no_link_between_nodes(inside: Link, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"machine": to_json(machine(8, 8, NO_LINK, inside=inside))}))
    found = find(str(path))
    assert found.machine.across == inside and said in found.unknown


def bench_file(folder: Path, **parts: Any) -> str:
    path = folder / "bench.json"
    path.write_text(json.dumps({"machine": to_json(machine(8, 4)), **parts}))
    return str(path)


def test_peaks_and_copies_of_a_bench_on_a_gpu(tmp_path: Path) -> None:
    matmul = {"fp32_flop_per_s": 50e12, "tf32_flop_per_s": 400e12, "bf16_flop_per_s": 700e12}
    found = find(bench_file(tmp_path, matmul=matmul, copies={"pinned_to_host_bytes_per_s": 55e9}))
    assert found.tflops == {"fp32": 50.0, "tf32": 400.0, "bf16": 700.0} and found.host_bytes_per_s == 55e9
    assert found.auto == "bf16" and found.unknown == ()


@pytest.mark.parametrize(
    ("said", "auto"), [({}, "fp16"), ({"auto_precision": "fp16"}, "fp16"), ({"auto_precision": "bf16"}, "bf16")]
)
def test_auto_is_what_the_bench_says_or_what_its_rates_show(said: dict[str, str], auto: str, tmp_path: Path) -> None:
    """Torch also times TF32 on a V100, where it is float32, and bf16, which is emulated."""
    v100 = {"fp32_flop_per_s": 14e12, "tf32_flop_per_s": 14e12, "bf16_flop_per_s": 10e12, "fp16_flop_per_s": 95e12}
    assert find(bench_file(tmp_path, matmul=v100, **said)).auto == auto


def test_a_bench_on_a_cpu_has_no_copies(tmp_path: Path) -> None:
    found = find(bench_file(tmp_path, matmul={"fp32_flop_per_s": 1e11, "bf16_flop_per_s": 2e11}))
    assert found.tflops == {"fp32": 0.1, "bf16": 0.2} and found.auto == "fp32"
    assert found.host_bytes_per_s == found.machine.inside.bytes_per_s
    assert found.unknown == ("checkpoints: copies to the host were not measured; the rate of the link inside is taken",)


def test_a_bench_of_some_parts_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    path.write_text(json.dumps({"machine": None, "disk": {}}))
    with pytest.raises(ConfigError) as error:
        find(str(path))
    assert (
        str(error.value) == f"machine={path}: is of some parts alone; run echelon bench without --only, --collectives"
    )


@pytest.mark.parametrize("text", ["", "{}", '{"machine": {"ranks": 2}}', "[1]", '{"machine": 3}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with refuses("machine", "file", "echelon", "bench"):
        find(str(tmp_path / "bad.json"))


def test_an_unknown_name_is_refused() -> None:
    with refuses("machine=8xh100", "preset"):
        find("8xh100")
