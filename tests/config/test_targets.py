"""S5: nothing but what an allowed package defines may be named, and all that the conf folder names may be."""

import ast
import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.cli import ROOT
from support.messages import refuses
from support.untrusted import LAZY

from trainer.config.build import build
from trainer.config.check import check_node
from trainer.config.targets import LIBRARIES, STAGES, locate, named_in_conf
from trainer.errors import ConfigError

OTHERS = """
import functools, os
from os import mkdir
alias = os.mkdir
bound = functools.partial(os.mkdir, "mark")
class Kept:
    run = staticmethod(os.mkdir)
"""
TARGET = re.compile(r"_target_: *([\w.]+)")
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
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "aliases", raising=False)
    node, allow = {"_target_": target, **arguments}, (*LIBRARIES, "aliases")
    for attempt in (check_node, build):
        with pytest.raises(ConfigError, match=rf"^recipe\._target_={re.escape(target)}: ") as error:
            attempt("recipe", node, allow)
            build("recipe", node, allow)
        assert "\n" not in str(error.value)
    assert not Path("mark").exists()


def own_definitions() -> set[str]:
    """All functions and classes of Echelon and its recipes, and the names under which their packages export them."""
    found = set[str]()
    for file in (path for package in ("trainer", "recipes", "echelon") for path in (ROOT / package).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            names = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            found |= {f"{module}.{name}" for name in [*names, *([node.name] if hasattr(node, "name") else [])]}
    return found


def test_of_echelons_own_code_a_config_names_only_what_conf_names(monkeypatch) -> None:
    monkeypatch.setattr("difflib.get_close_matches", lambda *_, **__: [])  # thousands of hints would take half a minute
    named = {target for path in (ROOT / "conf").glob("*/*.yaml") for target in TARGET.findall(path.read_text())}
    named |= set(STAGES)
    homes = {f"{found.__module__}.{found.__name__}" for found in (locate("key", name, ()) for name in named)}
    others = sorted(own_definitions() - named - homes)
    assert len(others) > 2000 and named == named_in_conf() and "recipes.lightning.recipe.Lightning" in homes
    assert all(locate("key", name, ()) for name in homes)
    for target in others:
        with pytest.raises(
            ConfigError, match=rf"^recipe\._target_={re.escape(target)}: (is not a name that|echelon is)"
        ):
            locate("recipe._target_", target, LIBRARIES)


def test_a_recipe_of_another_folder_is_named_with_what_lets_it_be_found(monkeypatch, tmp_path) -> None:
    """As where the command is given in the folder above."""
    (tmp_path / "my_spam.py").write_text("class Spam: pass\n")
    with refuses("x=my_spam.Spam", "'my_spam'", "my_spam"):
        locate("x", "my_spam.Spam", ("my_spam",))
    monkeypatch.syspath_prepend(tmp_path)
    with refuses("x=my_spam.deep.Spam", "'my_spam'"):
        locate("x", "my_spam.deep.Spam", ("my_spam",))
    assert locate("x", "my_spam.Spam", ("my_spam",)).__name__ == "Spam"


def test_names_are_imported_by_locate_alone() -> None:
    """Other calls import what the code names: a literal, a module of its own list."""
    known = {
        "trainer/config/targets.py": 1,  # locate
        "trainer/parallel/ddp.py": 1, "trainer/tools/tune/start.py": 1,  # torch._dynamo
        "trainer/launch/forkserver.py": 3,  # its own modules
        "trainer/main.py": 2,  # a tool, chosen from the files of trainer/tools; the one that compares a sweep's runs
    }  # fmt: skip
    imports = re.compile(r"\b(import_module|__import__|run_module|run_path|pydoc\.locate|resolve_name|exec)\(")
    files = (path for package in ("trainer", "recipes", "echelon") for path in (ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): len(imports.findall(path.read_text())) for path in files}
    assert {name: count for name, count in found.items() if count} == known


STRANGER = "from pathlib import Path\nPath('mark').mkdir()\nclass X: pass\n"
PAIRS = [(path.parent.name, path) for path in sorted((ROOT / "conf").glob("*/*.yaml")) if path.parent.name != "nccl"]


@pytest.mark.parametrize(("group", "path"), [pytest.param(*pair, id=f"{pair[0]}-{pair[1].stem}") for pair in PAIRS])
def test_no_key_of_a_group_imports_a_name(tmp_path, monkeypatch, group: str, path: Path) -> None:
    """Each key gets the name of a stranger's class, and a list and a dict of it; then all that a run asks for first."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    node = content[path.stem] if group == "callbacks" else content.get("recipe") if group == "recipe" else content
    for key in (node or {}).keys() - {"_target_", "_partial_"}:
        for value in ("stranger.X", ["stranger.X"], {"stranger.X": "stranger.X"}):
            changed = node | {key: value}
            with contextlib.suppress(ConfigError, TypeError, ValueError, AttributeError, OSError):
                made = build(group, changed, ())
                for name in ("kind", "collate", "optimizer", "schedule"):
                    getattr(made, name, None)
    assert "stranger" not in sys.modules and not Path("mark").exists()


def test_what_the_conf_folder_names_is_allowed() -> None:
    targets = named_in_conf()
    assert len(targets) > 50
    for target in [*targets, "torch.optim.SGD", "torch.nn.Linear"]:
        assert callable(locate("key._target_", target, LIBRARIES))


@pytest.mark.parametrize(("package", "why"), [(True, "comes later in sys.path"), (False, r"has no __init__\.py")])
def test_the_line_says_why_a_folder_of_recipes_is_hidden(tmp_path, monkeypatch, package: bool, why: str) -> None:
    """The command `echelon` appends the current folder."""
    (tmp_path / "recipes").mkdir()
    if package:
        (tmp_path / "recipes" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(ROOT), str(tmp_path)])
    line = f"Echelon's package recipes hides {tmp_path / 'recipes'}, which {why}; rename that folder"
    with pytest.raises(ConfigError, match=rf"^recipe\._target_=recipes\.mine\.Mine: {line}$"):
        locate("recipe._target_", "recipes.mine.Mine", (*LIBRARIES, "recipes"))


@pytest.mark.parametrize("nested", [{"_target_": "os.mkdir"}, [{"a": {"_target_": "torch.nn.Linear"}}]])
def test_a_target_inside_of_arguments_is_refused(nested: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer\.betas.*\._target_=\S+: a _target_ inside arguments is not built; give a plain"
    ):
        check_node("optimizer", {"_target_": "trainer.optim.factories.adamw", "betas": nested}, LIBRARIES)


@pytest.mark.parametrize("package", ["callbacks", "monitors"])
def test_a_class_whose_module_has_moved_is_found_by_its_former_name(package: str) -> None:
    """Configs of runs of older versions have it."""
    found = locate("callbacks.csv._target_", f"trainer.{package}.csv.CSV", ())
    assert (found.__module__, found.__name__) == ("trainer.loggers.csv", "CSV")
    progress = locate("callbacks.progress._target_", f"trainer.{package}.progress.callback.Progress", ())
    assert progress.__module__ == "trainer.loggers.progress.callback"
    for other in (f"trainer.{package}.csv.Logger", f"trainer.{package}.csv", "other.monitors.csv.CSV"):
        with pytest.raises(ConfigError):
            locate("callbacks.csv._target_", other, ())
