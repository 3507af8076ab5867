"""The quick start, word for word, as a stranger would type it: in a fresh copy of the checkout, and with the wheel."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import checkout
from support.blocks import blocks

LIMIT_S = 280
PROMISE_S = 120  # on two idle cores; printed, not asserted: the machine may be busy
SCRIPT = "./scripts/train --help\n"  # in the checkout alone


def page() -> str:
    return "\n".join(block.text for block in blocks("docs/quickstart.md"))


def type_in(text: str, folder: Path) -> str:
    """Run the page's commands in a folder, as a shell in which no environment is active; what they print."""
    (folder / "home").mkdir()
    environment = checkout.environment(folder, folder / "home")
    environment["PATH"] = environment["PATH"].partition(":")[2]  # the page activates .venv itself
    del environment["OMP_NUM_THREADS"]
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{text}"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    print(f"quick start: {time.monotonic() - began:.0f} s, of {PROMISE_S}")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert len(re.findall(r"finished at step", said)) == 5
    assert "recipe.widht" in said and "exit code 78" in said
    assert (folder / "runs/first/report.html").stat().st_size > 10_000
    assert (folder / "runs/first/export/model.safetensors").exists()
    return said


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 120)
def test_the_quick_start_runs_word_for_word(tmp_path: Path) -> None:
    checkout.copy(tmp_path)
    checkout.install(tmp_path)
    assert "installing" not in type_in(page(), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 120)
def test_the_quick_start_runs_with_the_installed_wheel(tmp_path: Path) -> None:
    """All that follows the installation, in a folder that has the text alone."""
    wheel = checkout.build_wheel(tmp_path / "wheel")
    folder = tmp_path / "empty"
    (folder / "docs").mkdir(parents=True)
    for file in (checkout.ROOT / "docs").glob("*.md"):
        (folder / "docs" / file.name).write_bytes(file.read_bytes())
    subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=folder, check=True)
    pip = [".venv/bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], cwd=folder, check=True)
    checkout.borrow(folder / ".venv")
    assert page().startswith(SCRIPT)
    where = "python -c 'import trainer; print(trainer.__file__)'"
    said = type_in(page().removeprefix(SCRIPT) + f"\necho trainer is $(cd / && {where})", folder)
    assert said.rpartition("trainer is ")[2].startswith(str(folder / ".venv"))


def test_the_quick_start_is_bash_alone() -> None:
    """So a reader needs no editor, and a script can run it."""
    found = list(blocks("docs/quickstart.md"))
    assert found and {(block.language, block.title, block.reason) for block in found} == {("bash", "", "")}
