"""Presets have the data sheets' numbers; a file is the bench's."""

import json
import math
from pathlib import Path

import pytest
from support.costs import machine

from trainer.errors import ConfigError
from trainer.monitors.throughput import COLUMN, H100
from trainer.tools.cost_model.machine import to_json
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


@pytest.mark.parametrize("text", ["", "{}", '{"machine": {"ranks": 2}}', "[1]", '{"machine": 3}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"has no machine .*; give a file of echelon bench"):
        find(str(tmp_path / "bad.json"))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="machine=8xh100: is no file and no preset; did you mean 8xh100-8x400g"):
        find("8xh100")
