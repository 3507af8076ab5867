"""S5: what a config may not build, by whatever name; nothing of it runs, and one line says so."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.cli import ROOT, run, toy
from support.untrusted import one_line

from trainer.checkpoint.commit import commit
from trainer.config.build import build
from trainer.config.check import check_node
from trainer.config.targets import ALLOWED, locate
from trainer.errors import ConfigError

OTHERS = """
import functools, os
from os import mkdir
alias = os.mkdir
bound = functools.partial(os.mkdir, "mark")
class Kept:
    run = staticmethod(os.mkdir)
"""
LAZY = {"name": "stranger", "module_file": "x", "import_structure": {"evil": ["export", "model", "data", "loss"]}}
BUILDS = {"key": "x", "node": {"_target_": "os.mkdir", "path": "mark"}, "allow": ["os"]}


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("os.mkdir", {"path": "mark"}),
        ("posix.mkdir", {"path": "mark"}),
        ("builtins.eval", {"source": "open('mark', 'w')"}),
        ("logging.os.system", {"command": "mkdir mark"}),
        ("trainer.main.os.system", {"command": "mkdir mark"}),
        ("trainer.config.build.build", BUILDS),  # which would build what its arguments allow
        ("trainer.optim.schedule.math.floor", {"x": 1}),
        ("torch.nn.modules.module.functools.partial", {"func": "os.mkdir"}),
        ("torch.nn.modules.module.os", {}),
        ("torch.optim.optimizer.functools", {}),
        ("torch.optim.optimizer.deepcopy", {"x": 1}),
        ("torch.load", {"f": "mark"}),
        ("torch.nn.functional.boolean_dispatch", {}),
        (
            "transformers.dynamic_module_utils.get_class_from_dynamic_module",
            {"class_reference": "x.X", "pretrained_model_name_or_path": "."},
        ),
        ("transformers.dynamic_module_utils.subprocess", {}),
        ("transformers.utils.import_utils._LazyModule", LAZY),
        ("transformers.training_args.TrainingArguments", {"output_dir": "mark"}),
        ("torch.nn.modules.lazy._LazyProtocol", {}),
        ("torch.nn.modules.module._IncompatibleKeys", {"missing_keys": [], "unexpected_keys": []}),
        ("aliases.mkdir", {"path": "mark"}),
        ("aliases.alias", {"path": "mark"}),
        ("aliases.bound", {}),
        ("aliases.os.mkdir", {"path": "mark"}),
        ("aliases.Kept.run", {"path": "mark"}),
        ("trainer", {}),
        ("..os.mkdir", {"path": "mark"}),
    ],
)
def test_nothing_but_what_an_allowed_package_defines(tmp_path, monkeypatch, target: str, arguments: Any) -> None:
    (tmp_path / "aliases.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "aliases", raising=False)
    node, allow = {"_target_": target, **arguments}, (*ALLOWED, "aliases")
    for attempt in (check_node, build):
        with pytest.raises(ConfigError, match=rf"^recipe\._target_={re.escape(target)}: ") as error:
            attempt("recipe", node, allow)
            build("recipe", node, allow)
        assert "\n" not in str(error.value)
    assert not Path("mark").exists()


def test_what_the_conf_folder_names_is_allowed() -> None:
    nodes = [OmegaConf.load(path) for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "nccl"]
    targets = re.findall(r"_target_: (\S+)", "\n".join(OmegaConf.to_yaml(node) for node in nodes))
    assert len(targets) == len(nodes)
    for target in [*targets, "torch.optim.SGD", "torch.nn.Linear"]:
        assert callable(locate("key", target, ALLOWED))


@pytest.mark.parametrize("nested", [{"_target_": "os.mkdir"}, [{"a": {"_target_": "torch.nn.Linear"}}]])
def test_a_target_inside_of_arguments_is_refused(nested: Any) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.betas.*\._target_=\S+: is inside of arguments; give a plain"):
        check_node("optimizer", {"_target_": "trainer.optim.factories.adamw", "betas": nested}, ALLOWED)


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
EXPORT = [sys.executable, "-m", "trainer.tools.export", "ckpt/run/step-00000001", "out"]


@pytest.fixture(scope="module")
def toy_config(tmp_path_factory) -> Any:
    words = ["--config-dir", str(ROOT / "tests/toy/conf"), "recipe=toy", "--cfg", "job"]
    return OmegaConf.create(run(words, tmp_path_factory.mktemp("config")).out)


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
    result = run([], cwd, EXPORT, PYTHONPATH=f"{ROOT}:{cwd}")
    assert (result.code, result.err) == (
        78,
        "echelon: recipe._target_=stranger.Recipe: stranger is not a package that configs may name; "
        "if you trust it, 'trainer.allow_targets=[stranger]'\n",
    )
    assert not (cwd / "mark").exists()
    run([], cwd, [*EXPORT, "trainer.allow_targets=[stranger]"], PYTHONPATH=f"{ROOT}:{cwd}")
    assert (cwd / "mark").exists()


@pytest.mark.parametrize("target", ["transformers.utils.import_utils._LazyModule", "torch.nn.Linear"])
def test_an_export_builds_of_other_packages_only_what_the_command_allows(download, target: str) -> None:
    """The first imports module `stranger` as soon as an attribute of it is asked for."""
    cwd = download({"recipe": {"_target_": target, **(LAZY if "Lazy" in target else {})}})
    told = one_line(run([], cwd, EXPORT, PYTHONPATH=f"{ROOT}:{cwd}"), 78)
    assert f"echelon: recipe._target_={target}: {target.split('.')[0]} is not a package that configs may name" in told
    assert not (cwd / "mark").exists()
    told = one_line(run([], cwd, [*EXPORT, "trainer.allow_targets=[transformers]"], PYTHONPATH=f"{ROOT}:{cwd}"), 78)
    assert "is no public nn.Module or Optimizer" in told or "is not a package" in told
    assert not (cwd / "mark").exists()


def test_an_export_builds_neither_optimizer_nor_schedule(download) -> None:
    recipe = {"_target_": "recipes.bert.Bert", "vocab": 512, "sequence": 32, "hidden": 32, "layers": 1, "heads": 2}
    stranger = {"_target_": "stranger.Recipe"}
    cwd = download({"recipe": {**recipe, "text": "private"}, "optimizer": stranger, "schedule": stranger})
    run([], cwd, EXPORT, PYTHONPATH=f"{ROOT}:{cwd}")
    assert not (cwd / "mark").exists()


def test_an_export_takes_paths_from_the_command_alone(download) -> None:
    """The stranger's config would have words of a private folder exported, and folders made elsewhere."""
    recipe = {"_target_": "recipes.bert.Bert", "vocab": 512, "sequence": 32, "hidden": 32, "layers": 1, "heads": 2}
    cwd = download({"recipe": {**recipe, "text": "private", "cache": "elsewhere"}})
    (cwd / "private").mkdir()
    for name in "ab":
        (cwd / "private" / name).write_text("words of the user's own " * 200)
    told = one_line(run([], cwd, EXPORT), 78)
    assert told == (
        "echelon: recipe.text=private: the run's config names this path; if you trust it, add 'recipe.text=private'\n"
    )
    told = one_line(run([], cwd, [*EXPORT, "recipe.text=private"]), 78)
    assert told.startswith("echelon: recipe.cache=elsewhere: the run's config names this path; ")
    assert not (cwd / "elsewhere").exists()
    told = one_line(run([], cwd, [*EXPORT, "recipe.text=private", "recipe.cache=own"]), 78)
    assert "its data has changed since" in told and (cwd / "own").is_dir()
