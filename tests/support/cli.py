"""Runs `python -m trainer.main` as a user would, on the toy recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from support.forked import Process

ROOT = Path(__file__).parents[2]
MAIN = [sys.executable, "-m", "trainer.main"]
TOY = ["--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=toy", "trainer.allow_targets=[toy_recipe,probe]"]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "toy")])
MARK = "ECHELON_TEST_RUN"  # has the folder of a run, in the environment of all its processes
# The import of the one takes most of a second; what the other says depends on the load of the machine.
QUICK = ["~callbacks.tensorboard", "~callbacks.advice"]
LOADED = (
    "trainer.main",
    "trainer.launch.launcher",
    "trainer.launch.forkserver",
    "trainer.config.check",
    "trainer.session",
    "torch._dynamo",
)
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
# Variables that nothing reads before `main` runs. With others a run has an interpreter of its own.
READ_LATE = ("HOME", "PYTHONPATH", "TMPDIR", "NCCL_", "WDS_", *LAUNCHERS)


class Result(NamedTuple):
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    return env | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


def popen(
    arguments: list[str],
    cwd: Path,
    command: list[str] | str = "trainer.main",
    loaded: tuple[str, ...] | None = None,
    **env: str,
) -> "subprocess.Popen[str]":
    """Start a command. A module's `main` runs in a process that is forked from one which has `loaded`.

    Where `env` has variables that are read as torch loads, the module has an interpreter of its own.
    """
    late = loaded or all(key.startswith(READ_LATE) for key in env)
    env = environment(**{MARK: str(cwd)} | env)
    if isinstance(command, str) and late:
        forked: Any = Process(command, arguments, cwd, env, loaded or LOADED)
        return forked
    words = [sys.executable, "-m", command] if isinstance(command, str) else command
    pipe = subprocess.PIPE
    return subprocess.Popen([*words, *arguments], cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)


def run(
    arguments: list[str],
    cwd: Path,
    command: list[str] | str = "trainer.main",
    timeout_s: float = 60,
    loaded: tuple[str, ...] | None = None,
    **env: str,
) -> Result:
    """Start a command as `popen` does, and run it to its end, which must come in time."""
    with popen(arguments, cwd, command, loaded, **env) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(
                "\n".join([f"{arguments} did not end in time", *process.communicate(timeout=5)])
            ) from None
        finally:
            process.kill()
    return Result(process.returncode, out, err)


def toy(arguments: list[str], cwd: Path, **env: str) -> Result:
    return run([*TOY, *QUICK, *arguments], cwd, **env)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("train/", "val/", "step", "samples")
    return [{key: value for key, value in line.items() if key.startswith(kept)} for line in found]


def weights(run: str, cwd: Path, step: int) -> bytes:
    return (cwd / "ckpt" / run / f"step-{step:08d}" / "model.safetensors").read_bytes()
