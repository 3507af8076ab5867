"""A SLURM cluster on this machine for tests: munged, slurmctld and slurmds in a folder of their own."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.process.exit import die_with_parent

NODES = 3  # called 127.0.0.1 and so on, which every machine can resolve and reach
CONFIG = """
ClusterName=echelon
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2
MpiDefault=none
ReturnToService=2
KillWait=10
FirstJobId={first_job}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A context. What it starts, and what that starts, has SLURM_CONF in its environment, and is ended by that."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf)}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Slurm":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        folder, host, ports = self.folder, socket.gethostname(), free_ports(NODES + 1)
        first = random.SystemRandom().randrange(1, 9000)  # from which ranks take their port
        lines = [CONFIG.format(folder=folder, host=host, port=ports.pop(), first_job=first)]
        names = [f"127.0.0.{n + 1}" for n in range(NODES)]
        lines += [f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={ports.pop()} CPUs=4" for name in names]
        self.conf.write_text("\n".join(lines) + "\n")
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files)
        wait_for((folder / "munge.sock").exists, "munged", said=self.logs)
        self._daemon("slurmctld", "-D")
        for name in names:
            self._daemon("slurmd", "-D", "-N", name)
        wait_for(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D") == str(NODES), "idle nodes", said=self.logs)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            daemon = subprocess.Popen(
                command, env=os.environ | self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                preexec_fn=die_with_parent,  # noqa: PLW1509 two system calls
            )  # fmt: skip
        self.daemons.append(daemon)

    def call(self, *command: str) -> str:
        """What a command of SLURM prints, in one line; empty where it fails."""
        done = subprocess.run(command, env=os.environ | self.env, capture_output=True, text=True, timeout=60)
        return "" if done.returncode else " ".join(done.stdout.split())

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in self.folder.glob("*.log"))

    def close(self) -> None:
        while pids := [pid for pid in processes() if is_of(pid, self.conf)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for daemon in self.daemons:
            daemon.wait()


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def is_of(pid: int, conf: Path) -> bool:
    with contextlib.suppress(OSError):
        return f"SLURM_CONF={conf}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def wait_for(true: Callable[[], Any], what: str, timeout_s: float = 150, said: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}\n{said()}"
        time.sleep(0.1)


def lacking() -> str:
    if os.geteuid() != 0:
        return "not root"
    return ", ".join(f"no {name}" for name in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(name))


needs_slurm = pytest.mark.skipif(bool(lacking()), reason=f"no SLURM: {lacking()}")
