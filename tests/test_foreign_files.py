"""Files of Echelon's names that are not Echelon's: in the current folder, or installed over it."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.cli import MAIN, QUICK, ROOT, TOY, run

START = re.findall("^start='(.*)'$", (ROOT / "scripts" / "train").read_text(), re.MULTILINE)
ECHELON = "import sys; sys.path.remove(''); import trainer.main; trainer.main.main()"  # as an installed command starts
each_start = pytest.mark.parametrize(
    "code", [*(pytest.param(code, marks=pytest.mark.slow) for code in START), ECHELON], ids=["scripts/train", "echelon"]
)


@each_start
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_in_the_current_folder_is_not_taken_for_echelon(code, ranks, tmp_path):
    (tmp_path / "trainer.py").write_text("raise SystemExit('the user\\'s')")
    words = [*TOY, *QUICK, "trainer.max_steps=2", "trainer.accelerator=cpu", f"trainer.devices={ranks}"]
    if (code, ranks) == (ECHELON, 1):
        words += ["--cfg", "job"]  # takes the same modules, and trains nothing
    done = run([*words, "trainer.restarts=0"], tmp_path, [sys.executable, "-c", code])
    assert (done.code, done.err) == (0, "")


@pytest.mark.slow
@each_start
def test_a_recipe_in_the_current_folder_is_found(code, tmp_path):
    (tmp_path / "mine.py").write_text("from toy_recipe import Toy as Mine")
    words = ["recipe._target_=mine.Mine", "trainer.allow_targets=[mine,toy_recipe]", "trainer.devices=2"]
    done = run([*TOY, *QUICK, "trainer.max_steps=2", *words], tmp_path, [sys.executable, "-c", code])
    assert (done.code, done.err) == (0, "")


def test_recipes_in_the_current_folder_are_named(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    done = run([], tmp_path, MAIN)
    file = tmp_path / "recipes" / "__init__.py"
    assert (done.code, done.err.count("\n")) == (78, 1)
    assert f"{file} hides Echelon's package recipes; rename it, or start in another folder" in done.err


@pytest.mark.parametrize("text", ["", "from echelon import Trainer"])
def test_a_trainer_in_the_current_folder_is_named_in_python(text, tmp_path):
    (tmp_path / "trainer.py").write_text(text)
    done = run([], tmp_path, [sys.executable, "-c", "from echelon import Trainer"])
    *_, last = done.err.splitlines()
    why = "hides Echelon's package trainer; rename it, or start in another folder"
    assert done.code == 1 and last == f"ImportError: {tmp_path / 'trainer.py'} {why}"


@pytest.mark.slow
@each_start
def test_a_folder_of_recipes_that_is_no_package(code, tmp_path):
    """It hides nothing of Echelon's; a class in it is not found, and the line says why."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.py").write_text("from toy_recipe import Toy as Mine")
    words = [*TOY, *QUICK, "trainer.max_steps=2"]
    done = run([*words, "trainer.accelerator=cpu"], tmp_path, [sys.executable, "-c", code])
    assert (done.code, done.err) == (0, "")
    done = run([*words, "recipe._target_=recipes.mine.Mine"], tmp_path, [sys.executable, "-c", code])
    assert (done.code, done.err.count("\n")) == (78, 1)
    assert f"Echelon's package recipes hides {tmp_path / 'recipes'}, which has no __init__.py; rename" in done.err


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name in ("trainer", "recipes", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


@pytest.mark.slow
@pytest.mark.parametrize("package", ["trainer", "recipes"])
def test_a_package_that_is_installed_over_echelon_is_named(package, site, tmp_path):
    """By pip, which says nothing. torchtune's `recipes` refuses to be imported."""
    file = site / package / "__init__.py"
    file.write_text('raise ModuleNotFoundError("not meant to be imported")\n' if package == "recipes" else "")
    done = run([], tmp_path, MAIN, PYTHONPATH=str(site))
    assert done.code != 0 and done.err.count("\n") == 1, done.err
    assert re.search(f"{re.escape(str(file))} is another package's.*; give Echelon an environment of its own", done.err)


def test_python_without_docstrings_runs_the_command(tmp_path):
    """A docstring told Echelon's package from another one of its name, and `python -OO` has none."""
    done = run(["--version"], tmp_path, MAIN, PYTHONOPTIMIZE="2")
    assert (done.code, done.err) == (0, "") and done.out.startswith("echelon-trainer ")
