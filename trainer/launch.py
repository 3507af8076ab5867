"""Who starts the ranks: torchrun, Open MPI or SLURM (by their variables), or our own supervisor. No torch here."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.errors import ConfigError
from trainer.signals import heeded, show_cursor

STOPPED = 75  # exit code: stopped by a signal with a checkpoint; start again to go on (sysexits' EX_TEMPFAIL)


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    store: str = ""  # a file to meet in; empty: by MASTER_ADDR and MASTER_PORT
    launcher: str = ""  # torchrun, mpirun, srun or echelon; empty: nobody, one process


def detect(env: MutableMapping[str, str], devices: int | str = "auto", nodes: int = 1) -> Place:
    """This process's place, from its launcher's variables. SLURM's own are translated into MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: where the launcher started another number of ranks than the settings say.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        world = int(env["WORLD_SIZE"])
        place = Place(
            int(env["RANK"]),
            world,
            int(env.get("LOCAL_RANK", "0")),
            int(env.get("LOCAL_WORLD_SIZE", str(world) if "LOCAL_RANK" in env else "1")),
            env.get("ECHELON_STORE", ""),
            "echelon" if "ECHELON_STORE" in env else "torchrun",
        )
    elif "OMPI_COMM_WORLD_RANK" in env:
        place = _open_mpi(env)
    elif int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        place = _slurm(env)
    else:
        return Place()
    per_node = place.local_world
    if devices not in ("auto", per_node):
        raise ConfigError(
            f"trainer.devices={devices}: {place.launcher} started {per_node} rank(s) on this node; "
            f"use trainer.devices={per_node} or leave it out"
        )
    if nodes not in (1, place.world // per_node):
        raise ConfigError(
            f"trainer.nodes={nodes}: {place.launcher} started {place.world} ranks on "
            f"{place.world // per_node} node(s); leave trainer.nodes out"
        )
    return place


def _open_mpi(env: MutableMapping[str, str]) -> Place:
    rank, world, local_rank, local_world = (
        int(env[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    store = ""
    if world > 1 and "MASTER_ADDR" not in env:
        folder = env.get("PMIX_SERVER_TMPDIR", "")  # of this mpirun alone, on this node; it removes it
        if local_world != world or not os.path.isdir(folder):
            raise ConfigError(
                f"mpirun: {world} ranks on several nodes need a meeting point; start them with "
                "`mpirun -x MASTER_ADDR=<first host> -x MASTER_PORT=29500 ...`"
            )
        store = f"{folder}/echelon-{env['PMIX_NAMESPACE']}"
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Place(rank, world, local_rank, local_world, store, "mpirun")


def _slurm(env: MutableMapping[str, str]) -> Place:
    world, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", "1"))
    if world % nodes or "," in env.get("SLURM_STEP_TASKS_PER_NODE", ""):
        raise ConfigError(
            f"srun: {world} tasks on {nodes} nodes are not the same number on each; use --ntasks-per-node"
        )
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]))
    env.setdefault("MASTER_PORT", str(20000 + (int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 20000))
    return Place(int(env["SLURM_PROCID"]), world, int(env["SLURM_LOCALID"]), world // nodes, "", "srun")


def first_host(nodes: str) -> str:
    """The first of SLURM's compressed list: "gpu[03-05,9],cpu1" -> "gpu03"."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.split(",")[0]
    inside, _, tail = rest.partition("]")
    return first_host(name + inside.split(",")[0].split("-")[0] + tail)


def refuse_crowd(devices: int | str) -> None:
    """A slip of the keyboard shall not start a thousand processes: 8 on any node, and 4 a core, are enough for tests on
    CPUs, and no node has more GPUs than that.

    Raises:
        ConfigError: for more.
    """
    most = max(8, 4 * cores())
    if isinstance(devices, int) and devices > most:
        raise ConfigError(
            f"trainer.devices={devices}: each is a process, and this node has {cores()} CPU core(s); "
            f"use at most {most} (8, or 4 a core)"
        )


def cores() -> int:
    """CPU cores that this process may use: a batch system may give it some of the node's."""
    return len(os.sched_getaffinity(0))


def let_first_tell() -> None:
    """Call it before an error is printed that other ranks may have too. The first rank of a node tells at once, and as
    it ends, torchrun and mpirun (and srun with -K) end the others: what they say after 5 s is theirs alone."""
    if any(os.environ.get(name, "0") != "0" for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")):
        time.sleep(5)


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL this process when its parent ends, however that ends (Linux); exit if `parent` has ended already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if parent not in (None, os.getppid()):
        os._exit(1)


def supervise(arguments: list[str], devices: int, logs: Path, further: Callable[[], str]) -> int:
    """Run `python -m trainer.main ARGUMENTS` once a rank on this node, and return the run's exit code.

    Ranks meet in a file of a private folder, so no port is opened but gloo's on loopback. Each is in a session of its
    own and is killed with this process. Signals to stop are passed on; when a rank fails, the others get 5 s to end,
    and the user is told of the one that failed first; and what `further` says, where no rank has reported an error.
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    passed: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed.append(number)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in heeded()}
    with tempfile.TemporaryDirectory(prefix="echelon-") as private:
        try:
            for rank in range(devices):
                ranks.append(_start(arguments, rank, devices, Path(private), logs))
            codes = _wait(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return _verdict(codes, Path(private), logs, passed, further())


def _start(arguments: list[str], rank: int, devices: int, private: Path, logs: Path) -> "subprocess.Popen[bytes]":
    env = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": str(devices),
        "ECHELON_PARENT": str(os.getpid()),
        "ECHELON_STORE": str(private / "store"),
        "ECHELON_ERROR_FILE": str(private / f"error-{rank}.json"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // devices))),
    }
    command = [sys.executable, "-m", "trainer.main", *arguments]
    if rank == 0:
        return subprocess.Popen(command, env=env, start_new_session=True)
    with open(logs / f"rank{rank}.log", "ab") as log:
        return subprocess.Popen(command, env=env, start_new_session=True, stdout=log, stderr=log)


def _wait(ranks: "list[subprocess.Popen[bytes]]") -> dict[int, int]:
    """Exit codes of the ranks that ended by themselves: once one has failed, the others have 5 s."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = {i: rank.returncode for i, rank in enumerate(ranks) if rank.poll() is not None}
        if deadline == float("inf") and not set(codes.values()) <= {0, STOPPED}:
            deadline = time.monotonic() + 5
    return codes


def _verdict(codes: Mapping[int, int], private: Path, logs: Path, passed: list[int], further: str = "") -> int:
    """The run's exit code, after a word on the rank that failed first; `further` where no error of ours is to mend."""
    failed = {rank: code for rank, code in codes.items() if code not in (0, STOPPED)}
    if not failed:
        return max(codes.values())
    show_cursor()
    reports: dict[int, dict[str, Any]] = {}
    for rank in failed:
        with contextlib.suppress(OSError, ValueError):
            reports[rank] = json.loads((private / f"error-{rank}.json").read_text())
    # Killed from outside or by its own fault; not an abort, which may be what a peer's failure has led to.
    silent = [rank for rank, code in failed.items() if rank not in reports and code != -signal.SIGABRT]
    if passed and not reports:
        text, code = f"echelon: {signal.Signals(passed[0]).name}: ended without a checkpoint{further}", 128 + passed[0]
    elif silent or not reports:
        rank, code = next((rank, failed[rank]) for rank in silent or failed)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        text = f"echelon: rank {rank} {how}; its log: {logs}/rank{rank}.log{further}"
        code = 128 - code if code < 0 else code
    else:
        rank = min(reports, key=lambda rank: reports[rank]["time"])
        text, code = reports[rank]["text"], reports[rank]["code"]
        text = text if text.startswith("echelon: ") else f"echelon: rank {rank} failed first:\n{text}"
    print(text, file=sys.stderr, flush=True)
    return code
