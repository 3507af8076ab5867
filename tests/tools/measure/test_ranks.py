"""Ranks that a tool starts: their place, their end, and one line for the first failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import environment

TOOL = r"""
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
what = sys.argv[1 + rank]
if what == "place":
    place = " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    os.write(1, f"{place}\n".encode())
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what in ("fails", "follows"):
    text = "echelon: the cause" if what == "fails" else "a collective failed"
    with open(os.environ["ECHELON_ERROR_FILE"], "w") as file:
        json.dump({"time": rank, "text": text, "code": 78, "in_collective": what == "follows"}, file)
    os._exit(78)
if what == "stays":
    time.sleep(60)
"""


def start(folder: Path, *what: str) -> "subprocess.CompletedProcess[str]":
    (folder / "a_tool.py").write_text(TOOL)
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); from trainer.tools.measure import ranks; "
        f"ranks.PEERS_S = 0.2; sys.exit(ranks.start('a_tool', {[*what]!r}, {len(what)}))"
    )
    env = {**environment(), "PYTHONPATH": f"{folder}{os.pathsep}{environment()['PYTHONPATH']}"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        (("place", "place"), 0, ""),
        (("follows", "fails"), 78, "echelon: the cause\n"),
        (("fails", "stays"), 78, "echelon: the cause\n"),
        (("stays", "killed"), 137, "echelon: rank 1 was killed by SIGKILL\n"),
    ],
)
def test_the_first_failure_is_told(what: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = start(tmp_path, *what)
    assert (done.returncode, done.stderr) == (code, said)
    if what == ("place", "place"):
        assert sorted(done.stdout.splitlines()) == ["0 2 0 2", "1 2 1 2"]
