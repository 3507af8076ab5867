"""Lists the choices of a search: combinations of callbacks and knobs that a run would accept."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import verify
from trainer.comm.nccl import VARIABLES
from trainer.cost.workload import Choice
from trainer.process import cgroup
from trainer.process.environment import Place
from trainer.tools.tune.configs import callbacks_of, is_exact, merge, node, ranks_with_data, refusal

Callbacks = dict[str, dict[str, Any]]  # name -> knobs
NOTHING = Choice({}, {})
BUCKETS_MIB = (1.0, 5.0, 100.0)
WORKERS = (0, 1, 2, 4)
COMPILE: Sequence[Callbacks] = ({}, {"compile": {"fallback_random": True}})
RECOMPUTE: Sequence[Callbacks] = (
    {}, {"activation_checkpoint": {"policy": "selective"}}, {"activation_checkpoint": {}}
)  # fmt: skip
LAYOUTS: Sequence[Callbacks] = (
    {}, {"overlap": {}}, {"shard": {"stage": 1}}, {"shard": {"stage": 2}}, {"shard": {"stage": 3}},
    {"shard": {"stage": 3, "reshard": False}},
)  # fmt: skip
SCHEDULES = ("1f1b", "zero_bubble")  # of pipelines; gpipe and interleaved lie between them
CODECS: Sequence[Callbacks] = tuple(
    {"grad_compress": {"codec": codec}} for codec in ("bf16", "fp16", "int8", "topk", "powersgd")
)
LOCAL_SGD: Sequence[Callbacks] = (
    {"local_sgd": {"every": 4}}, {"local_sgd": {"every": 16}}, {"local_sgd": {"every": 16, "delay": 8}}
)  # fmt: skip
NCCL: Sequence[dict[str, Any]] = (
    {"nccl.algo": "allreduce:Ring"}, {"nccl.algo": "allreduce:Tree"}, {"nccl.max_channels": 8},
    {"nccl.buffer_mib": 8.0},
)  # fmt: skip
SOCKETS: dict[str, Any] = {"nccl.socket_threads": 4, "nccl.sockets_per_thread": 4}  # of conf/nccl/ethernet.yaml
VARIANTS = {  # knobs whose values are a family each
    "shard": ("stage",), "pipeline": ("schedule",), "grad_compress": ("codec", "level"), "local_sgd": ("every",),
}  # fmt: skip


def candidates(
    config: Mapping[str, Any], place: Place, lossy: bool, without: Sequence[str] = (), blocks: int = 0,
    backend: str = "gloo", batch_norm: bool = False,
) -> list[Choice]:  # fmt: skip
    """Return every choice that a run of `place.world` ranks accepts, each one a change of today's config.

    Args:
        lossy: Also callbacks that change the numbers.
        without: Callbacks to leave out.
        blocks: Of the model, between which a pipeline may cut it; 0: none are known.
        backend: Of the collectives on the devices: gloo, nccl or mpi.
        batch_norm: The model's numbers depend on the micro-batch: another one is lossy.
    """
    exact = not lossy and is_exact(config)

    def runs(choice: Choice) -> bool:
        made = merge(config, choice)
        return not refusal(made, place.world) and not (exact and not is_exact(made))

    found: list[Choice] = []
    settings: dict[int, list[dict[str, Any]]] = {}  # by ranks with data, that a run accepts
    for callbacks in with_callbacks(config, place, lossy, blocks):
        if callbacks.keys() & set(without) or not runs(Choice(callbacks, {})) or not stages_fit(callbacks, blocks):
            continue
        ranks = ranks_with_data(merge(config, Choice(callbacks, {})), place.world)
        if ranks not in settings:
            few = {name: knobs for name, knobs in callbacks.items() if name == "pipeline"}
            all_of_them = with_settings(config, place, ranks, backend)
            settings[ranks] = [each for each in all_of_them if runs(Choice(few, each))]
        found += [Choice(callbacks, each) for each in settings[ranks] if fits_layout(config, callbacks, each, ranks)]
    if exact and batch_norm:
        found = [choice for choice in found if not changes_micro_batch(config, choice, place.world)]
    return [choice for choice in found if choice != NOTHING]


def changes_micro_batch(config: Mapping[str, Any], choice: Choice, world: int) -> bool:
    """Return whether a rank's passes have another number of samples with the choice: a pipeline may change it, too."""
    today, made = (
        micro_batch(each, each["batch"] // ranks_with_data(each, world)) for each in (config, merge(config, choice))
    )
    return today != made


def with_callbacks(config: Mapping[str, Any], place: Place, lossy: bool, blocks: int) -> Iterator[Callbacks]:
    """Yield the callbacks that may be added. Those of today's config stay, and keep their knobs."""
    groups: list[Sequence[Callbacks]] = [COMPILE, RECOMPUTE]
    if place.world > 1:
        nodes = place.world // place.local_world
        hybrid: Callbacks = {"shard": {"stage": 3, "hybrid": True}}
        several = 1 < nodes < place.world
        layouts = [*LAYOUTS, *([hybrid] if several else []), *pipelines(place.world, lossy, blocks)]
        groups += [layouts, [{}, *([{"hierarchical": {}}] if several else [])]]
        groups += [[{}, *(lossy_ones(several, begun_at(config)) if lossy else ())]]
    for parts in itertools.product(*groups):
        combined = {name: knobs for part in parts for name, knobs in part.items()}
        if not combined.keys() & config["callbacks"].keys():
            yield combined


def lossy_ones(several: bool, step: int) -> Iterator[Callbacks]:
    """Yield callbacks that send less than the gradients.

    Args:
        several: Ranks of several nodes, each with several ranks: codecs may work between nodes alone.
        step: At which a trial begins. Before the end of its warm-up, a trial of `onebit_adam` would be plain AdamW.
    """
    for own in CODECS:
        yield own
        if several:
            yield {"grad_compress": {**own["grad_compress"], "level": "inter"}}
    for own in LOCAL_SGD:
        yield own
        yield {**own, "grad_compress": {"codec": "int8"}}
    if step >= node("onebit_adam")["warmup_steps"]:
        yield {"onebit_adam": {}}


def begun_at(config: Mapping[str, Any]) -> int:
    """Return the step at which a trial begins: that of the checkpoint `trainer.resume`, or 0."""
    checkpoint = config["trainer"]["resume"]
    return verify(Path(checkpoint), hashes=False)["step"] if checkpoint else 0


def pipelines(world: int, lossy: bool, blocks: int) -> Iterator[Callbacks]:
    """Yield pipelines of 2 ranks, of 4 and so on, with the optimizer's state sharded over replicas or not."""
    for stages in (n for n in range(2, min(world, blocks) + 1) if world % n == 0 and n & (n - 1) == 0):
        for schedule in (*SCHEDULES, *(("pipedream_2bw",) if lossy else ())):
            own: Callbacks = {"pipeline": {"stages": stages, "schedule": schedule}}
            yield own
            if stages < world:
                yield {**own, "shard": {"stage": 1}}


def stages_fit(callbacks: Callbacks, blocks: int) -> bool:
    """Return whether the model has a block for each stage of a pipeline."""
    made = callbacks_of({"callbacks": with_targets(callbacks), "trainer": {"allow_targets": []}})
    return all(getattr(callback, "virtual", 0) <= blocks for callback in made.values())


def with_targets(callbacks: Callbacks) -> dict[str, Any]:
    return merge({"callbacks": {}}, Choice(callbacks, {}))["callbacks"]


def fits_layout(config: Mapping[str, Any], callbacks: Callbacks, settings: Mapping[str, Any], ranks: int) -> bool:
    """Return whether the layout uses these settings: some have no buckets of DDP's, and stages need micro-batches."""
    pipeline = callbacks.get("pipeline", {})
    if (pipeline or callbacks.get("shard", {}).get("stage") == 3) and "trainer.ddp.bucket_mib" in settings:
        return False
    samples = config["batch"] // ranks
    return samples // micro_batch({**config, **settings}, samples) >= pipeline.get("stages", 1)


def micro_batch(config: Mapping[str, Any], samples: int) -> int:
    """Return the micro-batch of a rank with so many samples."""
    return config["micro_batch"] or samples // (config["accumulate"] or 1)


def with_settings(
    config: Mapping[str, Any], place: Place, ranks: int, backend: str = "gloo"
) -> Iterator[dict[str, Any]]:
    """Yield settings that leave the numbers as they are, to rounding: micro-batches, buckets, data workers, NCCL's.

    With BatchNorm, other micro-batches change the numbers: `candidates` leaves them out of exact choices.

    Args:
        ranks: That read different samples.
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
    """Yield settings of NCCL that neither the config nor the environment has set."""
    several = place.world > place.local_world
    for each in (*NCCL, *((SOCKETS,) if several and not os.path.exists("/sys/class/infiniband") else ())):
        names = [key.removeprefix("nccl.") for key in each]
        if all(config["nccl"][name] is None and VARIABLES[name] not in os.environ for name in names):
            yield each


def near(samples: int, today: int) -> list[int]:
    """Return the divisors of a rank's samples within a factor of 4 of today's micro-batch, one for each factor of 2."""
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    aims = [today / 4, today / 2, today * 2, today * 4, samples]
    close = [min(divisors, key=lambda size: abs(size - aim)) for aim in aims]
    return sorted({size for size in close if today / 4 <= size <= today * 4 or size == samples})


def describe(choice: Choice) -> str:
    """Return the choice as the words that a command line takes."""
    words = [f"+{name}({', '.join(f'{key}={value}' for key, value in knobs.items())})" if knobs else f"+{name}"
             for name, knobs in choice.callbacks.items()]  # fmt: skip
    shown = {key: value for key, value in choice.settings.items() if key != "accumulate"}
    return " ".join([*words, *(f"{key}={value}" for key, value in shown.items())]) or "today's config"


def family(choice: Choice) -> str:
    """Return the name under which trials share what the model gets wrong of them: callbacks with a knob, NCCL's."""
    names = [".".join([name, *(str(knobs[knob]) for knob in VARIANTS.get(name, ()) if knob in knobs)])
             for name, knobs in choice.callbacks.items()]  # fmt: skip
    return "+".join(sorted([*names, *unseen(choice)])) or "plain"


def unseen(choice: Choice) -> list[str]:
    """Return the choice's settings of NCCL, as the cost model names those that it leaves out."""
    return [f"{key}={value}" for key, value in choice.settings.items() if key.startswith("nccl.")]
