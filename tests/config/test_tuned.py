"""The machine of a result of `trainer.tools.tune`, and where it differs."""

import dataclasses
from pathlib import Path

import pytest

from trainer.config.check import check_tuned
from trainer.config.tuned import Tuned, cpu_name, differences, gpu_models
from trainer.errors import ConfigError

HERE = Tuned(cpu_name(), None, 4, 2, "1 Gbit/s")


def test_the_same_machine_has_no_difference_whatever_its_link() -> None:
    assert differences(dataclasses.asdict(HERE) | {"link": "100 Mbit/s"}, HERE) == ""


def test_each_difference_is_named() -> None:
    other = dataclasses.asdict(HERE) | {"gpu": "H100", "ranks": 8}
    assert differences(other, HERE) == "gpu H100 there, None here; ranks 8 there, 4 here"


def test_gpus_are_named_by_the_driver_s_files(tmp_path: Path) -> None:
    for number in range(2):
        (folder := tmp_path / f"0000:0{number}:00.0").mkdir()
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\n")
    assert gpu_models(tmp_path) == ["NVIDIA H100 80GB HBM3"] * 2 and gpu_models(tmp_path / "none") == []


def test_the_key_is_checked() -> None:
    check_tuned(None)
    check_tuned(dataclasses.asdict(HERE))
    for values, reason in (
        ({"cpus": 1}, "tuned.cpus=1: no such key; did you mean cpu"),
        (dataclasses.asdict(HERE) | {"ranks": "two"}, "tuned.ranks=two: must be int, not str"),
        ({"cpu": "x"}, "is missing; let echelon tune write the file again"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_tuned(values)
