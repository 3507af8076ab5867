"""`scripts/train` installs into the .venv of the checkout, or into the environment that ECHELON_ENV names."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.cli import ROOT

# Notes its calls. `-m venv FOLDER` makes an environment of the same kind.
PYTHON = """#!/usr/bin/env bash
echo "$0 $*" >>"$CALLS"
if [[ "$1 $2" == "-m venv" ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
exit 0
"""


def environment_in(folder: Path) -> Path:
    for name in ("python", "python3", "pip"):
        file = folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PYTHON)
        file.chmod(0o755)
    return folder


@pytest.mark.parametrize("asked", [False, True])
def test_an_active_environment_is_left_alone_unless_it_is_named(asked, tmp_path):
    active, checkout, calls = environment_in(tmp_path / "active"), tmp_path / "checkout", tmp_path / "calls"
    shutil.copytree(ROOT / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("bench", "cluster"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout)
    env = {"VIRTUAL_ENV": str(active), "PATH": f"{active}/bin:{os.environ['PATH']}", "CALLS": str(calls)}
    env |= {"ECHELON_ENV": str(active)} if asked else {}
    command = [str(checkout / "scripts" / "train"), "batch=4"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines()
    used = active if asked else checkout / ".venv"
    installs = [line.split()[0] for line in lines if "pip install" in line]
    assert installs and set(installs) == {f"{used}/bin/python"}
    assert lines[-1].startswith(f"{used}/bin/python -c ") and lines[-1].endswith(" batch=4")
    assert f"train: installing into {used}" in done.stderr
    calls.unlink()
    assert subprocess.run(command, cwd=tmp_path, env=env, timeout=60).returncode == 0
    assert "pip" not in calls.read_text()  # the next call installs nothing
