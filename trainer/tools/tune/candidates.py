"""Lists the choices of a search: combinations of callbacks and knobs that a run would accept."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.callback import Role
from trainer.checkpoint.manifest import verify
from trainer.comm.nccl import VARIABLES
from trainer.composition import kinds
from trainer.cost.variant import Situation
from trainer.cost.workload import Choice
from trainer.process import cgroup
from trainer.process.environment import Place
from trainer.tools.cost_model.read import costs_of
from trainer.tools.tune.configs import is_exact, merge, ranks_with_data, refusal

Callbacks = dict[str, dict[str, Any]]  # name -> knobs
NOTHING = Choice({}, {})
NONE: dict[str, Any] = {"callbacks": {}, "trainer": {"allow_targets": []}}  # a config without callbacks
BUCKETS_MIB = (1.0, 5.0, 100.0)
WORKERS = (0, 1, 2, 4)
GROUPS = (  # roles of which a choice adds one callback at most
    (Role.COMPILE,), (Role.RECOMPUTE,), (Role.SPLIT, Role.SHARD, Role.OPTIMIZER), (Role.REDUCE,),
    (Role.COMPRESS, Role.SYNC),
)  # fmt: skip
NCCL: Sequence[dict[str, Any]] = (
    {"nccl.algo": "allreduce:Ring"}, {"nccl.algo": "allreduce:Tree"}, {"nccl.max_channels": 8},
    {"nccl.buffer_mib": 8.0},
)  # fmt: skip
SOCKETS: dict[str, Any] = {"nccl.socket_threads": 4, "nccl.sockets_per_thread": 4}  # of conf/nccl/ethernet.yaml


def candidates(
    config: Mapping[str, Any], place: Place, lossy: bool, without: Sequence[str] = (), blocks: int = 0,
    backend: str = "gloo", batch_norm: bool = False,
) -> list[Choice]:  # fmt: skip
    """Return every change of today's config that a run of `place.world` ranks accepts.

    Args:
        lossy: Include callbacks that change the numbers.
        without: Callbacks to leave out.
        blocks: Blocks of the model between which a pipeline may cut it; 0: unknown.
        backend: Backend of the devices' collectives: gloo, nccl or mpi.
        batch_norm: The numbers depend on the micro-batch, so changing it is lossy.
    """
    exact = not lossy and is_exact(config)

    def runs(choice: Choice) -> bool:
        made = merge(config, choice)
        return not refusal(made, place.world) and not (exact and not is_exact(made))

    found: list[Choice] = []
    settings: dict[int, list[dict[str, Any]]] = {}  # by ranks with data, that a run accepts
    for callbacks in with_callbacks(config, place, lossy, blocks):
        if callbacks.keys() & set(without) or not runs(Choice(callbacks, {})):
            continue
        ranks = ranks_with_data(merge(config, Choice(callbacks, {})), place.world)
        if ranks not in settings:
            costs = costs_of(callbacks, ())
            few = {name: knobs for name, knobs in callbacks.items() if (cost := costs[name]) and cost.stages > 1}
            all_of_them = with_settings(config, place, ranks, backend)
            settings[ranks] = [each for each in all_of_them if runs(Choice(few, each))]
        found += [Choice(callbacks, each) for each in settings[ranks] if fits_layout(config, callbacks, each, ranks)]
    if exact and batch_norm:
        found = [choice for choice in found if not changes_micro_batch(config, choice, place.world)]
    return [choice for choice in found if choice != NOTHING]


def changes_micro_batch(config: Mapping[str, Any], choice: Choice, world: int) -> bool:
    """Return whether the choice changes the samples per pass of a rank. A pipeline may do so, too."""
    today, made = (
        micro_batch(each, each["batch"] // ranks_with_data(each, world)) for each in (config, merge(config, choice))
    )
    return today != made


def with_callbacks(config: Mapping[str, Any], place: Place, lossy: bool, blocks: int) -> Iterator[Callbacks]:
    """Yield the callbacks that may be added. Those of today's config stay, and keep their knobs."""
    checkpoint = config["trainer"]["resume"]
    begun_at = verify(Path(checkpoint), hashes=False)["step"] if checkpoint else 0
    at = Situation(place.world, place.world // place.local_world, blocks, begun_at)
    groups: list[list[Callbacks]] = []
    for roles in GROUPS:
        named = [(name, variant) for name, kind in kinds().items() if kind.role in roles
                 for variant in kind.variants(at)]  # fmt: skip
        added: list[Callbacks] = [
            {name: dict(knobs), **{other: dict(each) for other, each in others.items()}}
            for name, (knobs, others) in named
        ]
        groups.append([{}, *(each for each in added if lossy or is_exact(merge(NONE, Choice(each, {}))))])
    for parts in itertools.product(*groups):
        combined = {name: knobs for part in parts for name, knobs in part.items()}
        if len(combined) == sum(map(len, parts)) and not combined.keys() & config["callbacks"].keys():
            yield combined


def fits_layout(config: Mapping[str, Any], callbacks: Callbacks, settings: Mapping[str, Any], ranks: int) -> bool:
    """Return whether the layout uses these settings: some have no DDP buckets, and stages need micro-batches."""
    costs = [cost for cost in costs_of(callbacks, ()).values() if cost]
    if not all(cost.ddp_buckets for cost in costs) and "trainer.ddp.bucket_mib" in settings:
        return False
    samples = config["batch"] // ranks
    return samples // micro_batch({**config, **settings}, samples) >= max((cost.stages for cost in costs), default=1)


def micro_batch(config: Mapping[str, Any], samples: int) -> int:
    return config["micro_batch"] or samples // (config["accumulate"] or 1)


def with_settings(
    config: Mapping[str, Any], place: Place, ranks: int, backend: str = "gloo"
) -> Iterator[dict[str, Any]]:
    """Yield settings that keep the numbers, up to rounding: micro-batches, buckets, data workers, NCCL's.

    With BatchNorm, other micro-batches change the numbers: `candidates` leaves them out of exact choices. `ranks` is
    the number of ranks that read different samples.
    """
    samples = config["batch"] // ranks
    today = micro_batch(config, samples)
    micros = [None, *(size for size in near(samples, today) if size != today)]
    sizes = [mib for mib in BUCKETS_MIB if mib != config["trainer"]["ddp"]["bucket_mib"]]
    buckets = [None, *sizes] if place.world > 1 else [None]
    cores = min(len(os.sched_getaffinity(0)) / place.local_world, cgroup.cores_each(place.local_world))
    own = config["data"]["workers"]
    workers = [None, *(count for count in WORKERS if count != own and count <= max(cores, 2))]
    transports = [{}, *(for_nccl(config, place) if backend == "nccl" and place.world > 1 else ())]
    for micro, bucket, count, nccl in itertools.product(micros, buckets, workers, transports):
        settings: dict[str, Any] = {}
        if micro is not None:
            settings |= {"micro_batch": micro, "accumulate": None}
        if bucket is not None:
            settings["trainer.ddp.bucket_mib"] = bucket
        if count is not None:
            settings["data.workers"] = count
        yield {**settings, **nccl}


def for_nccl(config: Mapping[str, Any], place: Place) -> Iterator[dict[str, Any]]:
    """Yield NCCL settings that neither the config nor the environment has set."""
    several = place.world > place.local_world
    for each in (*NCCL, *((SOCKETS,) if several and not os.path.exists("/sys/class/infiniband") else ())):
        names = [key.removeprefix("nccl.") for key in each]
        if all(config["nccl"][name] is None and VARIABLES[name] not in os.environ for name in names):
            yield each


def near(samples: int, today: int) -> list[int]:
    """Return divisors of `samples` within a factor of 4 of today's micro-batch, one for each factor of 2."""
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    aims = [today / 4, today / 2, today * 2, today * 4, samples]
    close = [min(divisors, key=lambda size: abs(size - aim)) for aim in aims]
    return sorted({size for size in close if today / 4 <= size <= today * 4 or size == samples})


def describe(choice: Choice) -> str:
    """Return the choice as words of a command line."""
    words = [f"+{name}({', '.join(f'{key}={value}' for key, value in knobs.items())})" if knobs else f"+{name}"
             for name, knobs in choice.callbacks.items()]  # fmt: skip
    shown = {key: value for key, value in choice.settings.items() if key != "accumulate"}
    return " ".join([*words, *(f"{key}={value}" for key, value in shown.items())]) or "today's config"


def family(choice: Choice) -> str:
    """Return the name under which trials share a residual of the model: callbacks with a knob, NCCL's settings."""
    names = [".".join([name, *(str(knobs[knob]) for knob in kinds()[name].family if knob in knobs)])
             for name, knobs in choice.callbacks.items()]  # fmt: skip
    return "+".join(sorted([*names, *unseen(choice)])) or "plain"


def unseen(choice: Choice) -> list[str]:
    """Return the choice's settings of NCCL, as the cost model names those that it leaves out."""
    return [f"{key}={value}" for key, value in choice.settings.items() if key.startswith("nccl.")]
