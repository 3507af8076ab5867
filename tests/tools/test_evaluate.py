"""`evaluate` of checkpoints: the run's own numbers, on any number of ranks, and one line for a mistake."""

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from support.cli import Result, run
from support.quick import quick
from support.stored import TRUSTED, train

from trainer.errors import ConfigError
from trainer.tools import evaluate as tool

EVALUATE = "trainer.tools.evaluate"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    train(folder)
    return folder


@pytest.fixture
def cwd(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def evaluate(cwd: Path, *arguments: str) -> Result:
    return run([*arguments, TRUSTED], cwd, EVALUATE)


@pytest.mark.parametrize("given", quick(["runs/r", "ckpt/last.pt", "ckpt/r", "ckpt/r/step-00000004"]))
def test_the_numbers_are_those_of_the_run(cwd, given):
    done = evaluate(cwd, given, "--devices", "1", "--json", "deep/metrics.json")
    assert done.code == 0, done.err
    summary = json.loads((cwd / "runs" / "r" / "summary.json").read_text())
    metrics = json.loads((cwd / "deep" / "metrics.json").read_text())
    assert metrics == pytest.approx({"val/error": summary["val/error"]}, rel=1e-12)
    assert done.out.splitlines()[-1] == f"val/error  {summary['val/error']:.6g}"


def test_three_ranks_count_each_sample_once(cwd):
    """13 samples in micro-batches of 2: the parts are unequal."""
    done = evaluate(cwd, "runs/r", "--devices", "3", "--json", "three.json", "--split", "test")
    assert done.code == 0, done.err
    summary = json.loads((cwd / "runs" / "r" / "summary.json").read_text())
    metrics = json.loads((cwd / "three.json").read_text())
    assert metrics == pytest.approx({"test/error": summary["val/error"]}, rel=1e-12)


def test_an_earlier_checkpoint_has_its_own_numbers(cwd):
    first, last = (evaluate(cwd, f"ckpt/r/step-0000000{step}", "--devices", "1").out for step in (2, 4))
    assert first.startswith("val/error") and first != last


@pytest.mark.parametrize(
    ("file", "said"),
    [("new/deep/m.json", "CHECKPOINT=nowhere: "), (".", r"--json=\.: is a folder; name a file")],
)
def test_a_refusal_comes_before_the_work_and_leaves_no_folder(tmp_path, file, said):
    given = Namespace(checkpoint="nowhere", changes=[], split="val", devices="1", micro_batch=None, json=Path(file))
    with pytest.raises(ConfigError, match=f"^{said}"):
        tool.evaluate(given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, said",
    quick(
        [
            (["runs/x"], r"CHECKPOINT=runs/x: .*; give runs/NAME, ckpt/last\.pt or a whole folder step-"),
            (["runs/r", "--devices", "many"], "--devices=many: is neither a number nor auto"),
            (["runs/r", "--devices", "1", "--split", "none"], r"recipe\.data\('none'\): is None; return data, or name"),
            (["runs/r", "--micro-batch", "0"], "--micro-batch=0: must be at least 1"),
            (["runs/r", "recipe.width=9"], "CHECKPOINT=runs/r: .* weights are missing, .* have another shape"),
        ],
        3,
    ),
)
def test_mistakes_are_one_line(cwd, arguments, said):
    done = evaluate(cwd, *arguments)
    assert done.code == 78 and done.err.count("\n") == 1
    assert re.match(f"echelon: {said}", done.err), done.err
