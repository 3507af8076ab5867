"""A run on 3 ranks in which something goes wrong, and what is asked of it afterwards: tests/faults."""

import contextlib
import json
import random
import socket
import time
from pathlib import Path
from typing import Any

from command import QUICK, TOY, Result, lines, run

RUN = [*TOY, *QUICK, "+callbacks=[probe]", "trainer.devices=3", "batch=12", "data.workers=1", "trainer.max_steps=12"]
RUN += ["trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=4", "trainer.checkpoint.keep=9"]
RUN += ["trainer.log_every_steps=1", "trainer.validate_every=6"]
IMPATIENT = "trainer.timeout_s=8"  # of a collective; ranks start within less of each other


def trouble(what: str, cwd: Path, *more: str, attempts: int = 1, rank: int = 1, step: int = 7, **env: str) -> Result:
    return run([*RUN, *troubling(what, attempts, rank, step), *more], cwd, timeout_s=110, **env)


def troubling(what: str, attempts: int = 1, rank: int = 1, step: int = 7) -> list[str]:
    """The arguments by which it makes trouble."""
    knobs = {"trouble": f"'{what}'", "rank": rank, "step": step, "attempts": attempts}
    return [f"callbacks.probe.{key}={value}" for key, value in knobs.items()]


def whole(cwd: Path, golden: Path, step: int = 12) -> None:
    """Nothing was lost or repeated, and nothing is left."""
    for name in ("model", "optimizer"):
        file = f"ckpt/r/step-{step:08d}/{name}.safetensors"
        assert (cwd / file).read_bytes() == (golden / file).read_bytes()
    assert lines(cwd / "runs" / "r") == lines(golden / "runs" / "r")
    hidden = [path.name for path in (cwd / "ckpt" / "r").iterdir() if path.name.startswith(".")]
    assert hidden == [".lock"]
    assert not [pid for pid in pids(cwd) if Path(f"/proc/{pid}").exists()]


def pids(cwd: Path) -> list[int]:
    """Of the ranks, once each has made a step; in their order."""
    facts = sorted((cwd / "runs" / "r").glob("facts-*.json"))
    return [json.loads(path.read_text())["pid"] for path in facts]


def events(cwd: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cwd / "runs" / "r" / "logs" / "events.jsonl").read_text().splitlines()]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def free_port() -> int:
    """Of those that `launch` gives SLURM's jobs."""
    while True:
        port = random.randrange(20000, 40000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
