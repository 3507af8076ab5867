"""Who has started this process, by its variables: torchrun, Open MPI, SLURM, our supervisor, or nobody. No torch."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from trainer.errors import ConfigError

FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torch's: ranks meet in a new store each time


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    store: str = ""  # a file to meet in; empty: by MASTER_ADDR and MASTER_PORT
    launcher: str = ""  # torchrun, mpirun, srun or echelon; empty: nobody, one process
    starts: bool = False  # it is not a rank yet: it starts those of its node, and `rank` is the first of them


def detect(env: MutableMapping[str, str], devices: int | str = "auto", nodes: int | str = 1) -> Place:
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
            "torchrun" if "ECHELON_STORE" not in env else "echelon" if env["ECHELON_STORE"] else "srun",
        )
    elif "OMPI_COMM_WORLD_RANK" in env:
        place = _open_mpi(env)
    elif int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # not SLURM_NTASKS: in salloc's shell that is the job's
        place = _slurm(env, devices)
    else:
        return Place()
    per_node = place.local_world
    if devices not in ("auto", per_node):
        raise ConfigError(
            f"trainer.devices={devices}: {place.launcher} started {per_node} rank(s) on this node; "
            f"use trainer.devices={per_node} or leave it out"
        )
    least, most = node_range(nodes)
    if nodes != 1 and not least <= place.world // per_node <= most:
        raise ConfigError(
            f"trainer.nodes={nodes}: {place.launcher} started {place.world} ranks on "
            f"{place.world // per_node} node(s); leave trainer.nodes out"
        )
    return place


def node_range(nodes: int | str) -> tuple[int, int]:
    """The least and the most that `trainer.nodes` takes.

    Raises:
        ConfigError: it means nothing.
    """
    least, colon, most = str(nodes).partition(":")
    most = most if colon else least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(f"trainer.nodes={nodes}: must be a number of nodes, or the least and the most, as 2:8")
    return int(least), int(most)


def refuse_nodes(
    place: Place, env: Mapping[str, str], nodes: int | str, resume: str | None, run_dir: str | None
) -> None:
    """torchrun starts all ranks again where one fails (`--max-restarts`) or a node comes or goes: they shall go on.

    Raises:
        ConfigError: nobody has started other nodes; or ranks would begin anew, or meet in what the ranks before them
            have left (pytorch#135712); or what they print before they meet would have no place.
    """
    if not place.launcher and nodes != 1:
        raise ConfigError(f"trainer.nodes={nodes}: start it on each node, with torchrun --nnodes={nodes} ... or srun")
    if place.starts and run_dir is None:
        raise ConfigError("srun with one task a node: the ranks that it starts need trainer.run_dir=runs/NAME")
    again = env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" or isinstance(nodes, str)
    needed = {
        "trainer.resume=auto": resume == "auto",
        "trainer.run_dir=runs/NAME": run_dir is not None,
        f"{FRESH_STORE}=1 in torchrun's environment": env.get(FRESH_STORE) == "1",
    }
    missing = [name for name, there in needed.items() if not there]
    if place.launcher == "torchrun" and again and missing:
        given = f"trainer.nodes={nodes}" if isinstance(nodes, str) else "torchrun --max-restarts"
        raise ConfigError(f"{given}: ranks that are started again could not go on; add {', '.join(missing)}")


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


def _slurm(env: MutableMapping[str, str], devices: int | str) -> Place:
    world, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_STEP_NUM_NODES"])
    if world % nodes or "," in env.get("SLURM_STEP_TASKS_PER_NODE", ""):
        raise ConfigError(
            f"srun: {world} tasks on {nodes} nodes are not the same number on each; use --ntasks-per-node"
        )
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]))
    env.setdefault("MASTER_PORT", str(20000 + (int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 20000))
    rank = int(env["SLURM_PROCID"])
    if world == nodes and isinstance(devices, int) and devices > 1:
        return Place(rank * devices, world * devices, 0, devices, "", "srun", starts=True)
    return Place(rank, world, int(env["SLURM_LOCALID"]), world // nodes, "", "srun")


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


def is_first() -> bool:
    """Whether this process tells what all know: rank 0 of a launcher's, or one that nobody has started."""
    others = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "ECHELON_PARENT")
    return not any(os.environ.get(name, "0") != "0" for name in others)
