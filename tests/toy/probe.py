"""A callback for tests of processes: notes what it sees of its own, and makes trouble at a step of a rank."""

import ctypes
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.callback import Callback, Role
from trainer.run import log


class Probe(Callback):
    """After its first step it writes facts-<rank>.json into the run's folder.

    Args:
        trouble: `raise`, `memory` (there is none left), `exit CODE`, `sleep S`, `hold` (the interpreter's lock),
            `reduce N` (a collective of N numbers that the others don't make; `begin N` doesn't wait for it), `worker`
            (SIGKILL to one of its data workers), or signals to this process or, after "parent ", to the one that
            started it; after "start: " it makes it as it starts, not at a step.
        rank: That makes it; -1 for all.
        step_s: Seconds that each step takes longer.
        attempts: In the first so many starts of the run only.
        audit: Append the samples of each step to audit.jsonl in the run's folder.
    """

    def __init__(
        self,
        trouble: str = "",
        rank: int = 0,
        step: int = 3,
        step_s: float = 0.0,
        attempts: int = 9999,
        audit: bool = False,
    ) -> None:
        self.trouble, self.rank, self.step, self.step_s, self.audit = trouble, rank, step, step_s, audit
        self.told = False
        if int(os.environ.get("ECHELON_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) >= attempts:
            self.trouble = ""
        at_start, _, what = self.trouble.partition("start: ")
        if what and not at_start:
            self.trouble = ""
            if os.environ.get("RANK") == str(rank):
                self.make_trouble(what, 0)

    def on_step_end(self, trainer) -> None:
        if not self.told:
            self.told = True
            path = trainer.run_dir / f"facts-{trainer.rank}.json"
            path.with_suffix(".tmp").write_text(json.dumps(facts(trainer)))
            path.with_suffix(".tmp").rename(path)
        if self.audit:
            start = f"{os.environ.get('MASTER_PORT')} {trainer.world}"  # of the ranks: a port of its own
            line = {"start": start, "world": trainer.world, "step": trainer.step, "refs": trainer.data.refs}
            with (trainer.run_dir / "audit.jsonl").open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        if trainer.step == self.step and self.rank in (-1, trainer.rank) and self.trouble:
            print("about to make trouble", flush=True)
            if trainer.saver.writing is not None:
                trainer.saver.writing.result()  # else what it goes on from would depend on the disk
            self.make_trouble(self.trouble, trainer.step)
        time.sleep(self.step_s)

    def make_trouble(self, what: str, step: int) -> None:
        if what == "raise":
            raise RuntimeError(f"trouble at step {step}")
        if what.startswith("exit "):
            os._exit(int(what.removeprefix("exit ")))
        if what == "memory":
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
        name, _, number = what.partition(" ")
        if name == "sleep":
            time.sleep(float(number))
            log.info("trouble is over")
            return
        if name in ("reduce", "begin"):
            self.begun = dist.all_reduce(torch.zeros(int(number)), async_op=name == "begin")
            return
        if what == "hold":
            ctypes.PyDLL(None).sleep(3600)
        if what == "worker":
            os.kill(min(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)
            return
        _, parent, names = what.rpartition("parent ")
        for name in names.split():
            os.kill(os.getppid() if parent else os.getpid(), getattr(signal, name))
            time.sleep(0.2)  # the same signal twice at once would be one


def facts(trainer) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "world": trainer.world,
        "initialized": dist.is_initialized(),
        "model": type(trainer.model).__name__,
        "listening": listening(sockets(os.getpid()) - sockets(os.getppid())),  # mpirun may leave its own open in a rank
        "parent listening": listening(sockets(os.getppid())),
    }


def sockets(pid: int) -> set[str]:
    return {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}


def listening(own: set[str]) -> list[str]:
    """Addresses, as /proc has them ("0100007F" is 127.0.0.1), at which connections to these sockets are taken."""
    tables = [Path(f"/proc/net/{kind}") for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


class Average(Callback):
    """In the role that `ema` has."""

    role = Role.AVERAGE
