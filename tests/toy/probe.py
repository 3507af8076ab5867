"""A callback for tests of processes: notes what it sees of its own, and makes trouble at a step of a rank."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from points import watch

from trainer.callback import Callback, Role
from trainer.checkpoint import commit
from trainer.log import log

WRITING = ("stage", "mid_write", "before_commit", "after_commit", "retention")  # of a checkpoint, beside training


class Probe(Callback):
    """After its first step it writes facts-<rank>.json into the run's folder; what happens when into probe.jsonl.

    Args:
        trouble: `raise`, `memory` (there is none left), `exit CODE`, `sleep S`, `hold` (the interpreter's lock),
            `reduce N` (a collective of N numbers that the others don't make; `begin N` doesn't wait for it), `worker`
            (SIGKILL to one of its data workers), `disk S` (a checkpoint takes so long), `fill FOLDER` (takes memory in
            this control group), or signals to this process or, after "parent ", to its launcher or, after "server ", to
            the process that has forked it; "start ": it has started a program by then that does not end with it. It
            is made once in a process.
        where: `startup`, `after_step` or one of points.py's; of several, each attempt takes the next.
        rank: That makes it; -1 for all; -2 for another in each start.
        step: The first that may be done, or written, by then.
        step_s: Seconds that each step takes longer.
        attempts: In the first so many starts of the run only.
        audit: Append the samples of each step to audit.jsonl in the run's folder.
    """

    def __init__(
        self,
        trouble: str = "",
        where: str = "after_step",
        rank: int = 0,
        step: int = 3,
        step_s: float = 0.0,
        attempts: int = 9999,
        audit: bool = False,
    ) -> None:
        starts = ("ECHELON_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
        attempt = max(int(os.environ.get(name, "0")) for name in starts)
        places = where.split()
        self.where = places[min(attempt, len(places) - 1)] if trouble and attempt < attempts else ""
        self.trouble, self.rank, self.step, self.step_s, self.audit = trouble, rank, step, step_s, audit
        self.told = False
        if rank == -2:
            self.rank = attempt % int(os.environ.get("WORLD_SIZE", "1"))  # not set in the process that starts the ranks
        if self.where == "startup" and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == str(rank):
            self.make_trouble(trouble, 0)

    def on_fit_start(self, trainer) -> None:
        self.trainer = trainer
        if self.where:
            watch(trainer, self.reach)

    def on_step_end(self, trainer) -> None:
        if not self.told:
            self.told = True
            path = trainer.run_dir / f"facts-{trainer.rank}.json"
            with contextlib.suppress(OSError):  # a disk may be full
                path.with_suffix(".tmp").write_text(json.dumps(facts(trainer)))
                path.with_suffix(".tmp").rename(path)
                self.note(first=trainer.step)
        if self.audit:
            start = f"{os.environ.get('MASTER_PORT')} {trainer.world}"  # of the ranks: a port of its own
            line = {"start": start, "world": trainer.world, "step": trainer.step, "refs": trainer.data.refs}
            with (trainer.run_dir / "audit.jsonl").open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        self.reach("after_step")
        time.sleep(self.step_s)

    def reach(self, where: str) -> None:
        """It is here now: the place for trouble, perhaps."""
        saver, step = self.trainer.saver, self.trainer.step
        step = saver.step if where in WRITING else step
        if where != self.where or step < self.step or self.rank not in (-1, self.trainer.rank):
            return
        self.where = ""
        print("about to make trouble", flush=True)
        if saver.writing is not None and where not in WRITING:
            saver.writing.result()  # else what it goes on from would depend on the disk
        self.note(trouble=step, where=where)
        self.make_trouble(self.trouble, step)

    def note(self, **what: Any) -> None:
        line = {"time": time.time(), "rank": self.trainer.rank, **what}
        with (self.trainer.run_dir / "probe.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

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
        if name == "disk":
            commit.commit, self.commit = self.slow_commit, commit.commit
            self.disk_s = float(number)
            return
        if name == "fill":
            Path(number, "cgroup.procs").write_text(str(os.getpid()))
            self.filled = b"x" * (1 << 30)
        if name == "start":
            subprocess.Popen(["sleep", "600"])
        if what == "hold":
            ctypes.PyDLL(None).sleep(3600)
        if what == "worker":
            os.kill(min(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)
            return
        *whom, names = re.split("(?<=parent|server) ", what.removeprefix("start "))
        pid = {"parent": os.getppid, "server": server}[whom[0]]() if whom else os.getpid()
        for name in names.split():
            os.kill(pid, getattr(signal, name))
            time.sleep(0.2)  # the same signal twice at once would be one

    def slow_commit(self, *args: Any) -> Path:
        time.sleep(self.disk_s)
        return self.commit(*args)


def server() -> int:
    """The process that has forked this rank: the launcher's first child. Ranks, which come later, show its command."""
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
    return next(int(pid) for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())


def facts(trainer) -> dict[str, Any]:
    own = sockets(os.getpid())
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "world": trainer.world,
        "drawn": np.random.random(),  # of NumPy's own generator, unseeded
        "initialized": dist.is_initialized(),
        "model": type(trainer.strategy.model).__name__,
        "listening": listening(own - sockets(os.getppid())),  # mpirun may leave its own open in a rank
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
