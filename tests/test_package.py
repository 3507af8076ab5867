"""What a user gets: the wheel, the two commands, and files that say nothing of the machine they were written on."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from support import checkout
from support.blocks import PAGES, blocks

from trainer.data.remote.download import PACKAGES

ROOT = Path(__file__).parents[1]
START = re.findall("^start='(.*)'$", (ROOT / "scripts" / "train").read_text(), re.MULTILINE)[0]
SOURCES = ("trainer", "recipes", "echelon")
FOLDERS = (*SOURCES, "conf", "tests", "scripts", "docs", ".ci")
NOT_TEXT = {".safetensors", ".pyc", ".png", ".gif", ".svg", ".gz", ".tar"}
CPU_ONLY = sys.platform == "linux" and not list(Path("/dev").glob("nvidia*")) and not shutil.which("nvidia-smi")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def texts() -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a worktree
    found += [path for folder in FOLDERS for path in files(ROOT / folder)]
    return [path for path in found if path.suffix not in NOT_TEXT]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, and with this one's packages."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed"]
    subprocess.run([*pip, "--prefix", str(folder), str(wheel)], check=True)
    checkout.borrow(folder)
    return folder / "bin"


def run(command: list[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def test_the_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    expected = {path.relative_to(ROOT).as_posix() for name in SOURCES for path in files(ROOT / name)}
    expected |= {f"trainer/{path.relative_to(ROOT).as_posix()}" for path in files(ROOT / "conf")}
    assert {Path(name).suffix for name in expected} >= {".py", ".md", ".yaml"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_help_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    result = run([installed / "python", "-m", "trainer.main", "--help"], tmp_path)
    assert result.returncode == 0, result.stderr
    names = {path.stem for group in ("recipe", "callbacks") for path in (ROOT / "conf" / group).glob("*.yaml")}
    assert names
    assert not [name for name in names if not re.search(rf"^ +{name}\b", result.stdout, re.MULTILINE)]
    assert run([installed / "python", installed / "echelon", "--help"], tmp_path).stdout == result.stdout


def test_config_of_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    where = run([installed / "python", "-c", "import trainer; print(trainer.__file__)"], tmp_path).stdout
    assert where.startswith(str(installed.parent)), "not the wheel's package"
    result = run([installed / "python", "-m", "trainer.main", "--cfg", "job"], tmp_path)
    assert result.returncode == 0, result.stderr
    top = set(re.findall(r"^\w+(?=:)", result.stdout, re.MULTILINE))
    assert {"recipe", "callbacks", "optimizer", "schedule", "trainer", "data", "batch"} <= top


def test_what_the_pages_import_is_in_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    """Each import of ours in a block of Python, as it stands there."""
    found = dict[str, str]()
    for page in PAGES:
        for block in (block for block in blocks(page) if block.language == "python"):
            for node in ast.walk(ast.parse(block.text)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if any((name or "").partition(".")[0] in SOURCES for name in names):
                    found.setdefault(ast.unparse(node), page)
    assert {"docs/python.md", "docs/samples.md"} <= set(found.values()), found
    lines = [*found, "import echelon, recipes, trainer", "print(echelon.__file__, recipes.__file__, trainer.__file__)"]
    result = run([installed / "python", "-c", "\n".join(lines)], tmp_path)
    assert result.returncode == 0, result.stderr
    files = result.stdout.split()
    assert [Path(file).parent.name for file in files] == ["echelon", "recipes", "trainer"]
    assert all(file.startswith(str(installed.parent)) for file in files), files


@pytest.mark.slow
def test_the_installed_wheel_trains_on_two_ranks(installed: Path, tmp_path: Path) -> None:
    toy = ROOT / "tests" / "toy"
    words = ["--config-dir", str(toy / "conf"), "recipe=toy", "trainer.max_steps=2", "trainer.run_dir=runs/r"]
    words += ["~callbacks.tensorboard", "trainer.accelerator=cpu", "trainer.devices=2"]
    command = [installed / "python", installed / "echelon", *words]
    result = run(command, tmp_path, PYTHONPATH=str(toy), OMP_NUM_THREADS="1")
    assert (result.returncode, result.stderr) == (0, "")
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert (summary["steps"], summary["ranks"]) == (2, 2)


def test_files_are_ascii() -> None:
    assert not [str(path.relative_to(ROOT)) for path in texts() if not path.read_bytes().isascii()]


def test_files_name_no_machine_and_no_registry() -> None:
    unwanted = re.compile(r"(?<![\w.}$-])/(work|root|home|opt)/|pypi\.org|pythonhosted\.|download\.pytorch")
    found = {path.relative_to(ROOT): unwanted.search(path.read_text()) for path in texts()}
    assert not [f"{path}: {match[0]}" for path, match in found.items() if match]


def test_what_messages_say_to_install_is_in_an_index_and_as_tested() -> None:
    """Echelon itself is in none."""
    sources = [path for name in SOURCES for path in files(ROOT / name) if path.suffix == ".py"]
    said = [line for path in sources for line in path.open() if "pip install" in line]
    named = {word for line in said for word in re.findall(r"'([^']+)'", line.partition("pip install")[2])}
    extras = (ROOT / "pyproject.toml").read_text()
    fixed = {word for word in named if "{" not in word}  # the others name what pyproject.toml has
    assert len(said) > 9 and len(fixed) > 6, said
    assert not [word for word in fixed if f'"{word}"' not in extras]
    assert not [word for word in PACKAGES.values() if f'"{word}"' not in extras]


STUB = """#!/usr/bin/env bash
echo "$*" >>"{log}"
case "$*" in
    *"import torch"*) {torch} ;;
    *"-m pip install"*torch==*) exit {build} ;;
    *"-m pip install"*) grep ^torch== "$PIP_CONSTRAINT" >>"{log}" ;;
esac
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of what the two commands read, in a folder with a space in its name."""
    folder = tmp_path / "check out"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(folder: Path, torch: str = "exit 1", build: int = 0) -> Path:
    """An environment whose python writes down its arguments; returns that log."""
    (folder / "bin").mkdir(parents=True)
    python, log = folder / "bin" / "python", folder / "log"
    python.write_text(STUB.format(log=log, torch=torch, build=build))
    python.chmod(0o755)
    return log


def test_an_active_environment_is_left_alone(copied: Path, tmp_path: Path) -> None:
    """It may be another project's, or have another checkout's editable install."""
    others = [environment(tmp_path / name) for name in ("venv", "conda")]
    own = environment(copied / ".venv")
    result = run(
        [copied / "scripts" / "train"],
        tmp_path,
        VIRTUAL_ENV=str(tmp_path / "venv"),
        CONDA_PREFIX=str(tmp_path / "conda"),
    )
    assert result.returncode == 0, result.stderr
    assert not [log for log in others if log.exists()]
    assert own.read_text().endswith(f"-c {START}\n")


def test_a_named_environment_must_be_there(copied: Path, tmp_path: Path) -> None:
    result = run([copied / "scripts" / "train"], tmp_path, ECHELON_ENV=str(tmp_path / "none"))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"ECHELON_ENV={tmp_path}/none: is no environment" in result.stderr


def test_the_second_call_installs_nothing(copied: Path, tmp_path: Path) -> None:
    log, named = environment(tmp_path / "env", torch="echo 2.12.1"), str(tmp_path / "env")
    test, train = copied / "scripts" / "test", copied / "scripts" / "train"
    result = run([test, "-k", "one test"], tmp_path, ECHELON_ENV=named)
    assert result.returncode == 0 and result.stderr.count("\n") == 1 and "installing" in result.stderr
    first = log.read_text().splitlines()
    assert first[-3:] == ["-m pip install -qq -e .[recipes,test]", "torch==2.12.1", "-m pytest -k one test"]
    for command, expected in ((test, "-m pytest"), (train, f"-c {START}")):  # test's extras include train's
        log.write_text("")
        assert run([command], tmp_path, ECHELON_ENV=named).stderr == ""
        assert log.read_text() == expected + "\n"
    with (copied / "constraints.txt").open("a") as file:
        file.write("# a new pin\n")
    assert "installing" in run([train], tmp_path, ECHELON_ENV=named).stderr


@pytest.mark.skipif(not CPU_ONLY, reason="has an NVIDIA GPU: any build of torch is welcome")
@pytest.mark.parametrize("build", [0, 1])
def test_without_a_gpu_only_the_cpu_build_will_do(copied: Path, build: int) -> None:
    log = environment(copied / ".venv", build=build)
    version = re.findall(r"^torch==(.*)", (copied / "constraints.txt").read_text(), re.MULTILINE)[0]
    result = run([copied / "scripts" / "train", "x=1"], copied)
    lines = log.read_text().splitlines()
    assert f"-m pip install -qq --no-deps torch=={version}+cpu" in lines
    if build == 0:
        assert lines[-2:] == [f"torch=={version}+cpu", f"-c {START} x=1"]
    else:
        assert result.returncode == 1 and "no NVIDIA GPU" in result.stderr.splitlines()[-1]
        assert not any("-e" in line.split() or "trainer.main" in line for line in lines)
