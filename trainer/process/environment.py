"""Detects the launcher of this process by its environment: torchrun, mpirun, srun, our supervisor, or none."""

import contextlib
import os
import resource
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError

FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's: ranks meet in a new store each time
MARK = "ECHELON_RANK_PROCESS"  # the process id of a rank
USUAL = {
    # Read when torch loads. Idle OpenMP threads that spin would take the cores of ranks and data workers.
    "OMP_WAIT_POLICY": "passive",
    # Read at the first cuBLAS call. `trainer.deterministic` needs this workspace; 32 MiB is Hopper's default.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}  # of a process that trains, unless the user has set them
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MPI_LOCALRANKID")
OF_LAUNCHERS = ("TORCHELASTIC_", "OMPI_COMM_", "PMI_", "SLURM_STEP_", "SLURM_PROCID")  # prefixes of their variables
OF_OURS = ("STORE", "ERROR_FILE", "PARENT", "ATTEMPT", "HEARTBEAT", "RANK_PROCESS")


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    store: str = ""  # path of a FileStore; empty: ranks meet at MASTER_ADDR and MASTER_PORT
    launcher: str = ""  # torchrun, mpirun, srun or echelon; empty: a single process without a launcher
    starts: bool = False  # this process is not a rank: it starts its node's ranks, of which `rank` is the first


def detect(env: MutableMapping[str, str], devices: int | str = "auto", nodes: int | str = 1) -> Place:
    """Return this process's place from its launcher's variables; under srun, set MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: A variable is missing, is not a number, or contradicts the others or the settings.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        world = _number(env, "WORLD_SIZE")
        place = Place(
            _number(env, "RANK"),
            world,
            _number(env, "LOCAL_RANK", 0),
            _number(env, "LOCAL_WORLD_SIZE", world if "LOCAL_RANK" in env else 1),
            env.get("ECHELON_STORE", ""),
            "torchrun" if "ECHELON_STORE" not in env else "echelon" if env["ECHELON_STORE"] else "srun",
        )
    elif "OMPI_COMM_WORLD_RANK" in env:
        place = _open_mpi(env)
    elif "PMI_RANK" in env and "MPI_LOCALRANKID" in env:  # srun may set PMI_RANK, too
        place = _mpich(env)
    elif _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:  # SLURM_NTASKS is the job's, and set in salloc's shell, too
        place = _slurm(env, devices)
    elif _number(env, "PMI_SIZE", 1) > 1:
        raise ConfigError(
            f"PMI_SIZE={env['PMI_SIZE']}: a launcher that Echelon doesn't know started this process; "
            "use torchrun, srun, or the mpirun of Open MPI, MPICH or Intel MPI"
        )
    else:
        return Place()
    _refuse_impossible(place)
    per_node = place.local_world
    if devices not in ("auto", per_node):
        raise ConfigError(
            f"trainer.devices={devices}: {place.launcher} started {per_node} rank(s) on this node; "
            f"use trainer.devices={per_node} or leave trainer.devices out"
        )
    least, most = node_range(nodes)
    if nodes != 1 and not least <= place.world // per_node <= most:
        raise ConfigError(
            f"trainer.nodes={nodes}: {place.launcher} started {place.world} ranks on "
            f"{place.world // per_node} node(s); leave trainer.nodes out"
        )
    return place


def variables(place: Place, private: Path) -> dict[str, str]:
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "ECHELON_STORE": place.store,
        "ECHELON_ERROR_FILE": str(private / f"error-{place.rank}.json"),
    }


def _refuse_impossible(place: Place) -> None:
    if not (place.rank < place.world and place.local_rank < place.local_world <= place.world):
        names = {"srun": "SLURM_*", "mpirun": "OMPI_COMM_WORLD_* or PMI_*"}.get(place.launcher)
        raise ConfigError(
            f"{names or 'RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE'}: this process is rank {place.rank} of "
            f"{place.world}, and {place.local_rank} of {place.local_world} on its node, by these variables; correct "
            "them, or unset them to train alone"
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name, "" if default is None else str(default))
    if name not in env and default is None:
        raise ConfigError(
            f"{name}: is not set, but other variables of its launcher are; set it, or unset them to train alone"
        )
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value}: is not a number, so no launcher set it; unset it, or start by torchrun or srun"
        )
    return int(value)


def node_range(nodes: int | str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes in `trainer.nodes`."""
    least, colon, most = str(nodes).partition(":")
    most = most if colon else least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(f"trainer.nodes={nodes}: must be a number of nodes, or a range MIN:MAX, as 2:8")
    return int(least), int(most)


def refuse_nodes(
    place: Place, env: Mapping[str, str], nodes: int | str, resume: str | None, run_dir: str | None
) -> None:
    """Refuse settings with which ranks on several nodes, or ranks that torchrun restarts, could not continue.

    torchrun restarts all ranks after a failure (`--max-restarts`), and after a node joined or left. Restarted ranks
    must meet in a new store because the old one has entries of their predecessors (pytorch#135712).
    """
    if not place.launcher and nodes != 1:
        fix = f"use torchrun --nnodes={nodes} ... on each node, or srun"
        raise ConfigError(f"trainer.nodes={nodes}: this process can't start other nodes; {fix}")
    if place.starts and run_dir is None:
        raise ConfigError(
            "srun with one task per node: the ranks of all nodes need one folder; give trainer.run_dir=runs/NAME"
        )
    again = env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" or isinstance(nodes, str)
    needed = {
        "trainer.resume=auto": resume == "auto",
        "trainer.run_dir=runs/NAME": run_dir is not None,
        f"{FRESH_STORE}=1 in torchrun's environment": env.get(FRESH_STORE) == "1",
    }
    missing = [name for name, there in needed.items() if not there]
    if place.launcher == "torchrun" and again and missing:
        given = f"trainer.nodes={nodes}" if isinstance(nodes, str) else "torchrun --max-restarts"
        raise ConfigError(f"{given}: restarted ranks could not resume; add {', '.join(missing)}")


def _open_mpi(env: MutableMapping[str, str]) -> Place:
    rank, world, local_rank, local_world = (
        _number(env, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    store = ""
    if world > 1 and "MASTER_ADDR" not in env:
        folder = env.get("PMIX_SERVER_TMPDIR", "")  # this mpirun's folder on this node, which mpirun removes
        if local_world != world or not os.path.isdir(folder):
            raise ConfigError(
                f"mpirun: {world} ranks on several nodes need an address to meet at; start them with "
                "`mpirun -x MASTER_ADDR=<first host> -x MASTER_PORT=29500 ...`"
            )
        store = f"{folder}/echelon-{env['PMIX_NAMESPACE']}"
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Place(rank, world, local_rank, local_world, store, "mpirun")


def _mpich(env: Mapping[str, str]) -> Place:
    """Return the place under MPICH's or Intel MPI's mpirun. Neither offers a store for ranks to meet in."""
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    rank, world, local_rank, local_world = (_number(env, name) for name in names)
    if world > 1 and "MASTER_ADDR" not in env:
        raise ConfigError(
            f"mpirun: {world} ranks need an address to meet at; start them with "
            "`mpirun -genv MASTER_ADDR <first host> -genv MASTER_PORT 29500 ...`"
        )
    return Place(rank, world, local_rank, local_world, "", "mpirun")


def _slurm(env: MutableMapping[str, str], devices: int | str) -> Place:
    world, nodes = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_STEP_NUM_NODES")
    if not nodes or world % nodes or "," in env.get("SLURM_STEP_TASKS_PER_NODE", ""):
        raise ConfigError(
            f"srun: {world} tasks on {nodes} nodes are not the same number on each node; use --ntasks-per-node"
        )
    if "MASTER_ADDR" not in env:
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if not hosts:
            raise ConfigError(f"SLURM_STEP_NUM_TASKS={world}: SLURM_STEP_NODELIST is not set; set both, or neither")
        env["MASTER_ADDR"] = first_host(hosts)
    if "MASTER_PORT" not in env:
        job = _number(env, "SLURM_JOB_ID") + _number(env, "SLURM_STEP_ID")
        env["MASTER_PORT"] = str(20000 + job % 20000)
    rank = _number(env, "SLURM_PROCID")
    if world == nodes and isinstance(devices, int) and devices > 1:
        return Place(rank * devices, world * devices, 0, devices, "", "srun", starts=True)
    return Place(rank, world, _number(env, "SLURM_LOCALID"), world // nodes, "", "srun")


def first_host(nodes: str) -> str:
    """Return the first host of a compressed SLURM list: "gpu[03-05,9],cpu1" -> "gpu03"."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return name.split(",")[0]
    inside, _, tail = rest.partition("]")
    return first_host(name + inside.split(",")[0].split("-")[0] + tail)


def refuse_without_loopback() -> None:
    """Refuse to start ranks if the loopback interface is down, as in a new network namespace."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # UDP, so nothing is sent
        except OSError as error:
            raise ConfigError(
                f"trainer.devices: ranks of one node connect over the loopback interface: {error.strerror}; "
                "switch it on by `ip link set lo up`, or give trainer.devices=1"
            ) from None


def raise_file_limit() -> int:
    """Raise and return the limit of open files: gloo needs a socket per peer and group, a prefetched batch a few."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        limit = most
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def avoid_foreign_cache(env: MutableMapping[str, str]) -> None:
    """Use a new folder for torch's compiled code if another user owns the default one in TMPDIR.

    torch._dynamo creates the folder when it is imported, and later runs code from there.
    """
    import atexit
    import getpass
    import shutil
    import tempfile

    with contextlib.suppress(OSError, KeyError):  # this user has no name, or the folder does not exist
        usual = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        own = os.lstat(usual).st_uid == os.geteuid() and os.path.isdir(usual)
        if not own and "TORCHINDUCTOR_CACHE_DIR" not in env:
            env["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="echelon-inductor-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def cores() -> int:
    """Return the CPU cores that this process may use; a batch system may grant only some of the node's."""
    return len(os.sched_getaffinity(0))


def threads_of(ranks: int) -> str:
    """Return OMP_NUM_THREADS for each of `ranks` on this node: the user's value, else an equal share of the cores."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // ranks))


def mark_rank(env: MutableMapping[str, str]) -> None:
    """Mark this process as a rank, so that `forget_ranks` recognises commands that its code starts."""
    env[MARK] = str(os.getpid())


def forget_ranks(env: MutableMapping[str, str]) -> None:
    """Let a command that a rank's code started run alone; otherwise it would take the rank's place, and hang."""
    if env.get(MARK, str(os.getpid())) == str(os.getpid()):
        return
    ours = {f"ECHELON_{name}" for name in OF_OURS}
    for name in [name for name in env if name in ours or name in OF_RANKS or name.startswith(OF_LAUNCHERS)]:
        del env[name]


LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "ECHELON_PARENT")  # a launcher sets one


def is_first_rank() -> bool:
    """Return whether this process prints messages for all ranks: it is rank 0, or has no launcher."""
    return not any(os.environ.get(name, "0") != "0" for name in LAUNCHED)


def is_launched() -> bool:
    return any(name in os.environ for name in LAUNCHED)
