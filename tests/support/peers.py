"""Runs a peer's script of tests/peers as its users would, under torchrun, and reads what it leaves."""

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from support.cli import ROOT, Result, popen
from support.faults import processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# Without it most restarts fail here, for ranks meet the addresses of those that are dead (pytorch/pytorch#167288).
STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT_S = 240
NAMES = {"lightning": "step={}.ckpt", "accelerate": "step_{}", "dcp": "step_{}"}


def launch(peer: str, cwd: Path, ranks: int = 3, restarts: int = 2, **env: str) -> Result:
    """To its end, which must come in time; nothing of it runs on."""
    script = str(ROOT / "tests" / "peers" / f"train_{peer}.py")
    words = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", script]
    with popen(words, cwd, TORCHRUN, **STORE, **env) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            for pid in processes(cwd):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return Result(process.returncode, out, err)


def saved(peer: str, cwd: Path) -> set[int]:
    """The steps of its checkpoints, whole or not."""
    return {step for step in range(99) if checkpoint(peer, cwd, step).exists()}


def checkpoint(peer: str, cwd: Path, step: int) -> Path:
    return cwd / "ckpt" / NAMES[peer].format(step)


def stopped_at(step: int, peer: str, golden: Path, cwd: Path) -> None:
    """As if the undisturbed run had ended after this checkpoint."""
    ignored = shutil.ignore_patterns(
        "samples-*", "final", *(NAMES[peer].format(later) for later in range(step + 1, 99))
    )
    shutil.copytree(golden, cwd, ignore=ignored, symlinks=True, dirs_exist_ok=True)
    if peer == "lightning":
        (cwd / "ckpt" / "last.ckpt").unlink()
        (cwd / "ckpt" / "last.ckpt").symlink_to(checkpoint(peer, cwd, step).name)


def off(cwd: Path, golden: Path) -> float:
    """By how much weights and optimizer after the last step differ: 0.0 where they are the same bits."""
    ours, theirs = ((folder / "final").read_bytes() for folder in (cwd, golden))
    return 0.0 if ours == theirs else float(np.abs(np.frombuffer(ours, "f4") - np.frombuffer(theirs, "f4")).max())


def steps(cwd: Path) -> list[list[int]]:
    """Of each attempt."""
    lines = [json.loads(line) for line in (cwd / "samples-0.jsonl").read_text().splitlines()]
    return [[step for attempt, step, _ in lines if attempt == which] for which in sorted({line[0] for line in lines})]


def samples(cwd: Path, ranks: int = 3) -> dict[int, list[int]]:
    """Of each step, on all ranks; of a step that was done again, those of the last time."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank in range(ranks):
        for line in (cwd / f"samples-{rank}.jsonl").read_text().splitlines():
            _, step, numbers = json.loads(line)
            found.setdefault(step, {})[rank] = numbers
    return {step: sorted(number for part in parts.values() for number in part) for step, parts in found.items()}
