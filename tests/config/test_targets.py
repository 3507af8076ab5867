"""S5: nothing but what an allowed package defines may be named, and all that the conf folder names may be."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import ROOT
from support.untrusted import LAZY

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
    files = [path.read_text() for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "nccl"]
    targets = re.findall(r"^\s*_target_: (\S+)", "\n".join(files), re.MULTILINE)
    assert len(targets) > 50
    for target in [*targets, "torch.optim.SGD", "torch.nn.Linear"]:
        assert callable(locate("key", target, ALLOWED))


@pytest.mark.parametrize(("package", "why"), [(True, "comes later in sys.path"), (False, r"has no __init__\.py")])
def test_the_line_says_why_a_folder_of_recipes_is_hidden(tmp_path, monkeypatch, package: bool, why: str) -> None:
    """The command `echelon` appends the current folder."""
    (tmp_path / "recipes").mkdir()
    if package:
        (tmp_path / "recipes" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), str(tmp_path)])
    line = f"Echelon's package recipes hides {tmp_path / 'recipes'}, which {why}; rename that folder"
    with pytest.raises(ConfigError, match=rf"^recipe\._target_=recipes\.mine\.Mine: {line}$"):
        locate("recipe", "recipes.mine.Mine", ALLOWED)


@pytest.mark.parametrize("nested", [{"_target_": "os.mkdir"}, [{"a": {"_target_": "torch.nn.Linear"}}]])
def test_a_target_inside_of_arguments_is_refused(nested: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer\.betas.*\._target_=\S+: a _target_ inside arguments is not built; give a plain"
    ):
        check_node("optimizer", {"_target_": "trainer.optim.factories.adamw", "betas": nested}, ALLOWED)
