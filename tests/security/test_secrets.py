"""Values of keys that are named like secrets: the recipe gets them, no file and no line of a run has them."""

import os
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.cli import LOADED, PYTHONPATH, TOY, Result, run

from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.data.shards.discover import find_shards
from trainer.errors import ConfigError, DataError
from trainer.run_dir import OF_RUNS
from trainer.tools.export import read_config

RECIPE = """
from pathlib import Path
from safetensors.torch import save_file
from toy_recipe import Toy

class Private(Toy):
    def __init__(self, hub_token: str, store: dict, source: str, proxy: str, **rest):
        super().__init__(**rest)
        assert (hub_token, store["password"], store["user"]) == ("s3cr3t-one", "s3cr3t-two", "me"), hub_token
        assert proxy == "pipe:curl https://u:s3cr3t@h/x", proxy
        assert source == "https://h/a-{0..9}.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t", source

    def export(self, model, folder):
        save_file(model.state_dict(), folder / "weights.safetensors")
"""
SIGNED = "https://h/a-{0..9}.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t"
WORDS = [
    *TOY, "trainer.allow_targets=[toy_recipe,private]", "recipe._target_=private.Private", "trainer.run_dir=runs/r",
    "recipe.hub_token=s3cr3t-one", "recipe.store={user: me, password: s3cr3t-two}", "trainer.devices=2",
    f"recipe.source='{SIGNED}'", "recipe.proxy='pipe:curl https://u:s3cr3t@h/x'",
]  # fmt: skip
TRUSTED = "trainer.allow_targets=[toy_recipe,private]"


def test_a_line_about_a_pattern_has_none() -> None:
    for pattern in (
        "https://h/a{0.tar?sig=s3cr3t",
        "ftp://u:s3cr3t@h/a.tar?sig=s3cr3t",
        "HTTP://h:0/{a,b}?token=s3cr3t",
    ):
        with pytest.raises((ConfigError, DataError)) as caught:
            find_shards(pattern)
        assert "s3cr3t" not in str(caught.value)


def private(words: list[str], cwd: Path, command: str = "trainer.main", **env: str) -> Result:
    env |= {"PYTHONPATH": f"{cwd}{os.pathsep}{PYTHONPATH}", "TMPDIR": str(cwd / "tmp")}
    return run(words, cwd, command, loaded=LOADED, **env)


def test_a_run_keeps_its_secrets_to_itself(tmp_path: Path) -> None:
    """In no file that stays, no line, and no argument of a rank; a resume and an export go on as always."""
    (tmp_path / "private.py").write_text(RECIPE)
    (tmp_path / "tmp").mkdir()
    for steps in (2, 4):
        result = private([*WORDS, f"trainer.max_steps={steps}", "trainer.resume=auto"], tmp_path)
        assert result.code == 0, result.err
        assert "s3cr3t" not in result.out + result.err and "recipe.hub_token=***" in result.out
        assert "'recipe.source='\"'\"'https://h/a-{0..9}.tar?***" in result.out
    assert "ckpt/r/step-00000002 at step 2" in result.out
    files = [path for folder in ("runs", "ckpt", "tmp") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if b"s3cr3t" in path.read_bytes()]
    config = OmegaConf.load(tmp_path / "runs" / "r" / "config.yaml")
    assert (config.recipe.hub_token, config.recipe.store) == ("***", {"user": "me", "password": "***"})

    export = ["ckpt/last.pt", "out", TRUSTED]
    refused = private(export, tmp_path, "trainer.tools.export")
    assert (refused.code, refused.err) == (
        78,
        "echelon: CHECKPOINT=ckpt/last.pt: runs/r/config.yaml hides recipe.hub_token, recipe.store.password, "
        "recipe.source, recipe.proxy, a secret; add recipe.hub_token=VALUE\n",
    )
    given = ["recipe.hub_token=s3cr3t-one", "recipe.store.password=s3cr3t-two", f"recipe.source={SIGNED}"]
    given += ["recipe.proxy=pipe:curl https://u:s3cr3t@h/x"]
    assert private([*export, *given], tmp_path, "trainer.tools.export").code == 0
    assert (tmp_path / "out" / "weights.safetensors").exists()


def test_values_of_the_environment_are_compared_and_secrets_among_them_hidden(tmp_path: Path) -> None:
    """`${oc.env:NAME}` is resolved once, as a run begins: a resume with another value tells both."""
    (tmp_path / "private.py").write_text(RECIPE)
    words = [*WORDS[:-3], *WORDS[-2:], "recipe.hub_token=${oc.env:HUB}", "optimizer.lr='${oc.decode:${oc.env:LR}}'"]
    for steps, rate in ((2, "0.01"), (4, "0.02")):
        given = [*words, "trainer.devices=1", f"trainer.max_steps={steps}", "trainer.resume=auto"]
        result = private(given, tmp_path, HUB="s3cr3t-one", LR=rate)
        assert result.code == 0, result.err
    assert "optimizer.lr was 0.01 and is 0.02" in result.out
    config = OmegaConf.load(tmp_path / "runs" / "r" / "config.yaml")
    assert (config.recipe.hub_token, config.optimizer.lr) == ("***", 0.02)
    files = [path for folder in ("runs", "ckpt") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]


def test_an_export_reads_no_variable_that_a_config_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config may be a stranger's, who would find the value in what is exported."""
    monkeypatch.setenv("S3CR3T", "s3cr3t")
    others = "".join(f"{name}: {{}}\n" for name in OF_RUNS if name != "recipe")
    (tmp_path / "config.yaml").write_text("recipe: {vocab: '${oc.env:S3CR3T}'}\n" + others)
    settings = read_config(tmp_path / "config.yaml", ["recipe.cache=here"], "CHECKPOINT=x", {})
    assert settings["recipe"] == {"vocab": "${oc.env:S3CR3T}", "cache": "here"}


def test_hydra_writes_nothing_of_a_multirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user's with the name of Hydra's record stays, in a refused command and in a good one."""
    monkeypatch.setattr(sys, "argv", ["echelon"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    files = [Path("multirun.yaml"), Path("runs/multirun.yaml")]
    Path("runs").mkdir()
    for file in files:
        file.write_text("- db.password=precious\n")
    for words in (["batch=12"], ["-m", "batch=12,24"]):
        assert compose([*words, "recipe.api_key=s3cr3t"], [CONF])
        with pytest.raises(ConfigError):
            compose([*words, "recipe.api_key=s3cr3t", "recipe=none"], [CONF])
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [path.absolute() for path in files]
    assert all(file.read_text() == "- db.password=precious\n" for file in files)


def test_a_refused_multirun_leaves_no_file(tmp_path: Path) -> None:
    words = ["-m", "batch=12,24", "recipe.hub_token=s3cr3t-one", "+recipe.store={password: s3cr3t-two}"]
    result = private([*TOY, *words], tmp_path)
    assert (result.code, result.err) == (
        78,
        "echelon: recipe.hub_token=***: no such key; there are depth, dropout, dtype, samples, width\n",
    )
    assert not list(tmp_path.iterdir())


SECRETS = ("hunter2", "hunter3", "hunter4")
FAILING = """
import os, subprocess
from toy_recipe import Toy

class Mine(Toy):
    def data(self, split):
        from trainer.log import log
        try:
            raise OSError("http://bob:hunter2@h/x?token=hunter3: refused, " + os.environ["MLFLOW_TRACKING_PASSWORD"])
        except OSError as error:
            log.warning("mine: %s", error, exc_info=True)
        return super().data(split)

    def loss(self, model, batch):
        url = "http://bob:hunter2@h/x?token=hunter3"
        raise RuntimeError(f"{url} refused {os.environ['MLFLOW_TRACKING_PASSWORD']}")
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_an_error_says_has_no_secrets(ranks: int, tmp_path: Path) -> None:
    """Neither on the terminal, nor in logs, events.jsonl and summary.json; of a warning, and of the end of the run."""
    (tmp_path / "mine.py").write_text(FAILING)
    words = [f"trainer.devices={ranks}", "recipe._target_=mine.Mine", "trainer.allow_targets=[mine,toy_recipe]"]
    done = run(
        [*TOY, "~callbacks.tensorboard", *words, "trainer.max_steps=2", "trainer.run_dir=runs/r", "trainer.restarts=0"],
        tmp_path,
        loaded=LOADED,
        MLFLOW_TRACKING_PASSWORD="hunter4",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHONPATH}",
    )
    assert done.code == 1 and "http://***@h/x?*** refused ***" in done.err, done
    files = {path: path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    found = [(path, secret) for path, text in files.items() for secret in SECRETS if secret in text]
    assert not found and not [secret for secret in SECRETS if secret in done.out + done.err]
    assert "refused ***" in files[tmp_path / "runs/r/summary.json"]
