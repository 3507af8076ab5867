"""Runs `python -m trainer.main` as a user would, on the toy recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from support.forked import run_forked

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, "-m", "trainer.main"]
TOY = ["--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=toy", "trainer.allow_targets=[toy_recipe,probe]"]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "toy")])
MARK = "ECHELON_TEST_RUN"  # has the folder of a run, in the environment of all its processes
# The import of the one takes most of a second; what the other says depends on the load of the machine.
QUICK = ["~callbacks.tensorboard", "~callbacks.advice"]
LOADED = ("trainer.main", "trainer.launch.launcher", "trainer.config.check", "torch._dynamo")
# Variables that nothing reads before `main` runs. With others a run has an interpreter of its own.
READ_LATE = {"HOME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "TMPDIR", "WORLD_SIZE"}
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")


class Result(NamedTuple):
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    return env | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


def popen(arguments: list[str], cwd: Path, command: list[str] | None = None, **env: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    words = [*(command or MAIN), *arguments]
    env = environment(**{MARK: str(cwd)} | env)
    return subprocess.Popen(words, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)


def run(
    arguments: list[str],
    cwd: Path,
    command: list[str] | None = None,
    timeout_s: float = 60,
    loaded: tuple[str, ...] | None = None,
    **env: str,
) -> Result:
    """Run it to its end, which must come in time.

    `trainer.main` runs in a process that is forked from one which has `loaded`; in an interpreter of its own where
    `env` has variables that are read as torch loads.
    """
    try:
        if loaded or (not command and env.keys() <= READ_LATE):
            env = environment(**{MARK: str(cwd)} | env)
            return Result(*run_forked("trainer.main", arguments, cwd, env, loaded or LOADED, timeout_s))
        with popen(arguments, cwd, command, **env) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        return Result(process.returncode, out, err)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{arguments} did not end in time\n{late.stdout}\n{late.stderr}") from None


def toy(arguments: list[str], cwd: Path, **env: str) -> Result:
    return run([*TOY, *QUICK, *arguments], cwd, **env)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("train/", "val/", "step", "samples")
    return [{key: value for key, value in line.items() if key.startswith(kept)} for line in found]


def weights(run: str, cwd: Path, step: int) -> bytes:
    return (cwd / "ckpt" / run / f"step-{step:08d}" / "model.safetensors").read_bytes()
