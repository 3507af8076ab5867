"""A user's YAML file is read as it shows, or refused by its name and line."""

import sys
from pathlib import Path

import pytest

from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.config.user_yaml import check_file
from trainer.errors import ConfigError

HEAD = "# @package _global_\nrecipe: {_target_: toy_recipe.Toy}\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"trainer: {seed: 010}", "line 3: 010 would be read as 8; write 10, or quote"),
        (b"batch: 1:30", "line 3: 1:30 would be read as 90; write one decimal number, or quote"),
        (b"data: {map: [-007]}", "line 3: -007 would be read as -7; write 7, or quote"),
        (b"# caf\xe9", "line 3: is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_file_that_yaml_reads_otherwise_is_refused(content, told, tmp_path, monkeypatch):
    (tmp_path / "recipe").mkdir()
    file = tmp_path / "recipe" / "own.yaml"
    file.write_bytes(HEAD.encode() + content)
    monkeypatch.setattr(sys, "argv", ["main", "--config-dir", str(tmp_path)])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    with pytest.raises(ConfigError) as refused:
        compose(["--config-dir", str(tmp_path), "recipe=own"], [CONF, tmp_path])
    assert str(refused.value).startswith(f"{file}: {told}")


def test_a_byte_order_mark_is_named(tmp_path):
    Path(tmp_path, "own.yaml").write_text(HEAD, encoding="utf-8-sig")
    with pytest.raises(ConfigError, match=r"own.yaml: begins with a byte order mark, which hides '# @package'"):
        check_file(tmp_path / "own.yaml")


@pytest.mark.parametrize("value", ["0", "-0", "0x10", "0.5", "00", "1_6", "'010'", "1e-3", "12:75", "a:b", "", "[}"])
def test_other_values_pass(value, tmp_path):
    Path(tmp_path, "own.yaml").write_text(f"{HEAD}batch: {value}\r\n")
    check_file(tmp_path / "own.yaml")
