"""The constructor's signature is the schema: each YAML shows every knob, with its default, and says what it is."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from omegaconf import OmegaConf
from support.cli import ROOT, environment

from trainer.annotated import fits
from trainer.comm.nccl import NCCLOptions
from trainer.config.check import LIBRARIES
from trainer.config.options import DataOptions, Options
from trainer.config.schema import ANY_NAME, NO_DEFAULT, knobs

FILES = sorted(path for path in (ROOT / "conf").glob("*/*.yaml"))
NODES = [path for path in FILES if path.parent.name not in ("recipe", "nccl")]


def load(path: Path) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(OmegaConf.load(path))
    return config


DERIVED = [
    path
    for path in FILES
    if any(isinstance(base, str) and (path.parent / f"{base}.yaml").exists() for base in load(path).get("defaults", []))
]
RECIPES = [path for path in FILES if path.parent.name == "recipe" and path not in DERIVED]
TARGETS = [path for path in FILES if path.parent.name != "nccl" and path not in DERIVED]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_file_says_what_it_is(path):
    comments = [line for line in path.read_text().splitlines()[:2] if line.startswith("# ") and "@package" not in line]
    assert len(comments) == 1
    assert len(comments[0]) < 100


@pytest.mark.parametrize("path", NODES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_knob_is_shown_with_its_default(path):
    node = load(path)
    if path.parent.name == "callbacks":
        assert list(node) == [path.stem]
        node = node[path.stem]
    module, _, name = node.pop("_target_").rpartition(".")
    partial = node.pop("_partial_", False)
    parameters = dict(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    if partial:
        parameters.pop("params")
    if path.parent.name == "optimizer":
        assert node.pop("groups", "") is None  # of any optimizer: settings for some of the parameters
    defaults = {key: list(p.default) if isinstance(p.default, tuple) else p.default for key, p in parameters.items()}
    assert node == defaults
    assert list(node) == list(defaults)


def test_a_recipe_that_derives_from_another_leaves_its_knobs_to_it():
    assert [path.stem for path in DERIVED if "recipe" in load(path)] == []
    assert {path.stem for path in DERIVED} >= {"bert_base_growing", "gpt2_compile"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_recipe_shows_every_knob(path):
    node = load(path)["recipe"]
    module, _, name = node.pop("_target_").rpartition(".")
    assert list(node) == list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def test_the_sections_are_the_dataclasses():
    config = load(ROOT / "conf" / "config.yaml")
    assert config["trainer"] == dataclasses.asdict(Options())
    assert config["data"] == dataclasses.asdict(DataOptions())
    assert load(ROOT / "conf" / "nccl" / "default.yaml") == dataclasses.asdict(NCCLOptions())


def test_a_config_is_checked_without_torch():
    code = (
        "import atexit, sys; sys.argv[1:] = ['optimizer.lrr=1']\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'numpy' in sys.modules))\n"
        "from trainer.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (78, ["False", "False"])
    assert done.stderr == "echelon: optimizer.lrr=1: no such key; did you mean lr?\n"


@pytest.mark.parametrize(
    ("value", "kind", "fit"),
    [
        (1, int, True), (True, int, False), (1.0, int, False), (1, float, True), (True, float, False),
        (None, int | None, True), ("1", int | None, False), ("a", str, True), (["a"], list[str], True),
        ([1], list[str], False), ("a", list[str], False), ([0.9, 0.99], tuple[float, float], True),
        ([0.9], tuple[float, float], False), ([1, 2, 3], tuple[int, ...], True), ("x", Literal["x", 1], True),
        (True, Literal["x", 1], False), ({}, dict, True), (object(), Any, True),
    ],
)  # fmt: skip
def test_types(value, kind, fit):
    assert fits(value, kind) is fit


def test_yaml_of_the_config_is_plain():
    """No Python tags, no anchors: a reader of another language could load it."""
    for path in [*FILES, ROOT / "conf" / "config.yaml"]:
        assert yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_signature_read_from_source_is_the_real_one(path):
    node = load(path)
    target = node.get(path.stem, node.get("recipe", node))["_target_"]
    module, _, name = target.rpartition(".")
    real = inspect.signature(getattr(importlib.import_module(module), name), eval_str=True).parameters
    known = knobs("key", target, LIBRARIES)
    assert list(known) == list(real)
    assert [n for n in known if (known[n].default is NO_DEFAULT) != (real[n].default is inspect.Parameter.empty)] == []
    plain = {n: knob.annotation for n, knob in known.items() if knob.annotation is not Any}
    assert plain == {n: real[n].annotation for n in plain}


SHAPES = """
from dataclasses import dataclass, field
from typing import ClassVar
from torch import nn

class Own:
    def __init__(self, a: int, *, b: "str" = "x", c: nn.Module | None = None): ...
class Child(Own): ...
class Open(Own):
    def __init__(self, d: int = 1, **rest): ...
class Elsewhere(nn.Linear): ...
class Nothing: ...
@dataclass
class Fields:
    a: int
    kind: ClassVar[str] = "k"
    b: list[int] = field(default_factory=list)
@dataclass(order=True)
class More(Fields):
    c: float = 1.0
def function(x, y=2): ...
"""


def test_shapes_of_signatures(tmp_path, monkeypatch):
    """A constructor that is not in the class's own source is asked of the object: no class is refused for it."""
    (tmp_path / "shapes.py").write_text(SHAPES)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {name: knobs("key", f"shapes.{name}", ("shapes",)) for name in (
        "Own", "Child", "Open", "Elsewhere", "Nothing", "Fields", "More", "function",
    )}  # fmt: skip
    assert {name: list(known) for name, known in found.items()} == {
        "Own": ["a", "b", "c"],
        "Child": ["a", "b", "c"],
        "Open": ["d", ANY_NAME],
        "Elsewhere": ["in_features", "out_features", "bias", "device", "dtype"],
        "Nothing": [],
        "Fields": ["a", "b"],
        "More": ["a", "b", "c"],
        "function": ["x", "y"],
    }
    required = {(name, n) for name, known in found.items() for n, knob in known.items() if knob.default is NO_DEFAULT}
    assert required - {("Open", ANY_NAME)} == {
        ("Own", "a"), ("Child", "a"), ("Elsewhere", "in_features"), ("Elsewhere", "out_features"), ("Fields", "a"),
        ("More", "a"), ("function", "x"),
    }  # fmt: skip
