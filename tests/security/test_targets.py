"""S5: what a config may not build, by whatever name; nothing of it runs, and one line says so."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.cli import ROOT, Result, run, toy
from support.quick import quick
from support.untrusted import LAZY, one_line

from trainer.checkpoint.commit import commit


@pytest.mark.parametrize("target", ["os.system", "logging.os.system", "trainer.main.os.system"])
def test_the_command_runs_none(tmp_path: Path, target: str) -> None:
    result = toy([f"recipe._target_={target}", "recipe.command='mkdir mark'"], tmp_path)
    assert one_line(result, 78).startswith(f"echelon: recipe._target_={target}: ")
    assert not (tmp_path / "mark").exists()


STRANGER = """
from pathlib import Path
Path("mark").mkdir()
class Recipe:
    pass
"""
CONFIG = {"trainer": {"allow_targets": ["stranger"], "seed": 0}}
PATHS = ["ckpt/run/step-00000001", "out"]


@pytest.fixture(scope="module")
def toy_config(tmp_path_factory) -> Any:
    words = ["--config-dir", str(ROOT / "tests/toy/conf"), "recipe=toy", "--cfg", "job"]
    return OmegaConf.create(run(words, tmp_path_factory.mktemp("config")).out)


def export(cwd: Path, *words: str) -> Result:
    return run([*PATHS, *words], cwd, "trainer.tools.export", PYTHONPATH=f"{ROOT}:{cwd}")


@pytest.fixture
def download(toy_config: Any, tmp_path: Path) -> Any:
    """Makes a whole download: code, a run's folder with a config, a checkpoint that points to it."""

    def make(change: dict[str, Any]) -> Path:
        (tmp_path / "stranger.py").write_text(STRANGER)
        (tmp_path / "run").mkdir()
        config = OmegaConf.merge(toy_config, CONFIG)
        for name, node in change.items():
            config[name] = node
        OmegaConf.save(config, tmp_path / "run" / "config.yaml")
        manifest = {"run_dir": "run", "samples": 0, "world": 1, "buckets": [], "ddp": {}}
        identity = {"model": "", "optimizer": "", "data": ""}
        commit(tmp_path / "ckpt" / "run", 1, {"state.json": memoryview(b"{}")}, {**manifest, "identity": identity})
        return tmp_path

    return make


def test_the_config_beside_a_checkpoint_allows_nothing(download) -> None:
    cwd = download({"recipe": {"_target_": "stranger.Recipe"}})
    result = export(cwd)
    assert (result.code, result.err) == (
        78,
        "echelon: recipe._target_=stranger.Recipe: stranger is not a package that configs may name; "
        "if you trust it, add 'trainer.allow_targets=[stranger]'\n",
    )
    assert not (cwd / "mark").exists()
    export(cwd, "trainer.allow_targets=[stranger]")
    assert (cwd / "mark").exists()


@pytest.mark.parametrize("target", quick(["transformers.utils.import_utils._LazyModule", "torch.nn.Linear"]))
def test_an_export_builds_of_other_packages_only_what_the_command_allows(download, target: str) -> None:
    """The first imports module `stranger` as soon as an attribute of it is asked for."""
    cwd = download({"recipe": {"_target_": target, **(LAZY if "Lazy" in target else {})}})
    told = one_line(export(cwd), 78)
    assert f"echelon: recipe._target_={target}: {target.split('.')[0]} is not a package that configs may name" in told
    assert not (cwd / "mark").exists()
    told = one_line(export(cwd, "trainer.allow_targets=[transformers]"), 78)
    assert "is not a public nn.Module or Optimizer" in told or "is not a package" in told
    assert not (cwd / "mark").exists()


def test_an_export_builds_neither_optimizer_nor_schedule(download) -> None:
    recipe = {"_target_": "recipes.bert.Bert", "vocab": 512, "sequence": 32, "hidden": 32, "layers": 1, "heads": 2}
    stranger = {"_target_": "stranger.Recipe"}
    cwd = download({"recipe": {**recipe, "text": "private"}, "optimizer": stranger, "schedule": stranger})
    export(cwd)
    assert not (cwd / "mark").exists()


def test_an_export_takes_paths_from_the_command_alone(download) -> None:
    """The stranger's config would have words of a private folder exported, and folders made elsewhere."""
    recipe = {"_target_": "recipes.bert.Bert", "vocab": 512, "sequence": 32, "hidden": 32, "layers": 1, "heads": 2}
    cwd = download({"recipe": {**recipe, "text": "private", "cache": "elsewhere"}})
    (cwd / "private").mkdir()
    for name in "ab":
        (cwd / "private" / name).write_text("words of the user's own " * 200)
    told = one_line(export(cwd), 78)
    assert told == (
        "echelon: recipe.text=private, recipe.cache=elsewhere: the run's config names these paths; if you trust them, "
        "add 'recipe.text=private' 'recipe.cache=elsewhere'\n"
    )
    told = one_line(export(cwd, "recipe.text=private"), 78)
    assert told == (
        "echelon: recipe.cache=elsewhere: the run's config names this path; if you trust it, add "
        "'recipe.cache=elsewhere'\n"
    )
    assert not (cwd / "elsewhere").exists()
    told = one_line(export(cwd, "recipe.text=private", "recipe.cache=own"), 78)
    assert "the data has changed since" in told and (cwd / "own").is_dir()
