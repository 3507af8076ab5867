"""Ranks that a tool starts: their place, their end, and one line for the first failure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.cli import environment

from trainer.tools.measure.ranks import wait

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


@pytest.mark.parametrize(
    ("codes", "in_collective", "said", "code"),
    [
        ([0, 0], False, [], 0),
        ([1, 0], False, ["echelon: rank 0 failed first:", "ValueError: x"], 1),
        ([1, -6], False, ["echelon: rank 0 failed first:", "ValueError: x"], 1),  # a peer's failure aborts a rank
        ([1, 0], True, ["echelon: rank(s) 1 ended with code 0 before the others: the likely cause"], 1),
    ],
)
def test_the_rank_at_fault_is_named(codes, in_collective, said, code, tmp_path, capsys):
    report = {"time": 0.0, "text": "ValueError: x\n", "code": 1, "in_collective": in_collective}
    (tmp_path / "error-0.json").write_text(json.dumps(report))
    assert wait([Mock(**{"poll.return_value": each}) for each in codes], tmp_path) == code
    told = capsys.readouterr().err.splitlines()
    assert told[len(told) - len(said) :] == said and bool(told) == bool(code)
