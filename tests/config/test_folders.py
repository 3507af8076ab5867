"""The folders in which configs are looked for."""

import os
import re

import pytest

from trainer.config.folders import CONF, config_dirs, naming_defaults
from trainer.errors import ConfigError


def test_a_pipe_among_yaml_files_is_not_waited_for(tmp_path):
    (tmp_path / "recipe").mkdir()
    os.mkfifo(tmp_path / "recipe" / "mine.yaml")
    with pytest.raises(ConfigError, match=r"--config-dir .*mine.yaml is no file; put a YAML file there"):
        config_dirs(["--config-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("file", "fix"), [("optimizer/adamw.yaml", "rename it"), ("config.yaml", "move its keys to recipe/NAME.yaml")]
)
def test_a_file_that_echelons_own_would_hide_is_refused(tmp_path, file, fix):
    """Hydra reads its first folder's: the user's rate was dropped without a word."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes((CONF / file).read_bytes())
    assert config_dirs([f"--config-dir={tmp_path}"]) == [tmp_path]  # a copy has the same values
    (tmp_path / file).write_text("lr: 0.5\n")
    with pytest.raises(ConfigError, match=rf"{file} has the name of Echelon's own, which hides it; {fix}$"):
        config_dirs([f"--config-dir={tmp_path}"])


@pytest.mark.parametrize(
    ("text", "argv", "told"),
    [
        ("batch=64: does not", ["recipe=x"], "batch=64 (the default): does not"),
        ("batch=64: does not", ["recipe=x", "batch=64"], "batch=64: does not"),
        ("batch=24: does not", [], "batch=24: does not"),  # a recipe's YAML sets it
        ("trainer.overfit=null: x", [], "trainer.overfit=null: x"),
        ("data.shuffle_shards=64: x", ["data.workers=1"], "data.shuffle_shards=64 (the default): x"),
        ("data.shuffle_shards=64: x", ["+data={shuffle_shards: 64}"], "data.shuffle_shards=64: x"),
        ("a.b=c: x", [], "a.b=c: x"),
        ("no key", [], "no key"),
    ],
)
def test_an_error_says_that_a_value_is_the_default(text, argv, told):
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"), naming_defaults(argv):
        raise ConfigError(text)
