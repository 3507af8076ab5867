"""Lists the choices of a search: combinations of callbacks and knobs that a run would accept."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.process.environment import Place
from trainer.tools.cost_model.workload import Choice
from trainer.tools.tune.configs import is_exact, merge, ranks_with_data, refusal

NOTHING = Choice({}, {})
BUCKETS_MIB = (1.0, 5.0, 100.0)
WORKERS = (0, 1, 2, 4)
CODECS: Sequence[dict[str, Any]] = (
    {"codec": "bf16"}, {"codec": "fp16"}, {"codec": "int8"}, {"codec": "topk"}, {"codec": "powersgd"}
)  # fmt: skip
LOCAL_SGD: Sequence[dict[str, Any]] = ({"every": 4}, {"every": 16}, {"every": 16, "delay": 8})


def candidates(config: Mapping[str, Any], place: Place, lossy: bool, without: Sequence[str] = ()) -> list[Choice]:
    """Return every choice that a run of `place.world` ranks accepts, each one a change of today's config.

    Args:
        lossy: Also callbacks that change the numbers.
        without: Callbacks to leave out.
    """
    today_exact = is_exact(config)

    def runs(choice: Choice) -> bool:
        made = merge(config, choice)
        return not refusal(made, place.world) and (lossy or is_exact(made) or not today_exact)

    listed = [each for each in with_callbacks(config, place, lossy) if not each.keys() & set(without)]
    callbacks = [each for each in listed if runs(Choice(each, {}))]
    settings = [each for each in with_settings(config, place) if runs(Choice({}, each))]
    found = [Choice(*parts) for parts in itertools.product(callbacks, settings)]
    return [choice for choice in found if choice != NOTHING]


Callbacks = dict[str, dict[str, Any]]  # name -> knobs


def with_callbacks(config: Mapping[str, Any], place: Place, lossy: bool) -> Iterator[Callbacks]:
    """Yield the callbacks that may be added. Those of today's config stay, and keep their knobs."""
    if place.world == 1:
        yield from ({}, {"compile": {"fallback_random": True}})
        return
    nodes = place.world // place.local_world
    first: list[Callbacks] = [{}, {"compile": {"fallback_random": True}}]
    steps: list[Callbacks] = [{}, {"overlap": {}}, {"shard": {"stage": 1}}]
    levels: list[Callbacks] = [{}]
    levels += [{"hierarchical": {}}] if 1 < nodes < place.world else []
    sent: list[Callbacks] = [{}]
    if lossy:
        sent += [{"grad_compress": codec} for codec in CODECS]
        sent += [{"local_sgd": knobs} for knobs in LOCAL_SGD]
        sent += [{"local_sgd": knobs, "grad_compress": {"codec": "int8"}} for knobs in LOCAL_SGD]
        sent += [{"onebit_adam": {}}]
    for parts in itertools.product(first, steps, levels, sent):
        combined = {name: knobs for part in parts for name, knobs in part.items()}
        if not combined.keys() & config["callbacks"].keys():
            yield combined


def with_settings(config: Mapping[str, Any], place: Place) -> Iterator[dict[str, Any]]:
    """Yield settings that leave the numbers as they are, to rounding: micro-batches, buckets, data workers."""
    samples = config["batch"] // ranks_with_data(config, place.world)
    today = config["micro_batch"] or samples // (config["accumulate"] or 1)
    micros = [None, *(size for size in near(samples, today) if size != today)]
    sizes = [mib for mib in BUCKETS_MIB if mib != config["trainer"]["ddp"]["bucket_mib"]]
    buckets = [None, *sizes] if place.world > 1 else [None]
    cores = max(1, len(os.sched_getaffinity(0)) // place.local_world)
    own = config["data"]["workers"]
    workers = [None, *(count for count in WORKERS if count != own and count <= max(cores, 2))]
    for micro, bucket, count in itertools.product(micros, buckets, workers):
        settings: dict[str, Any] = {}
        if micro is not None:
            settings |= {"micro_batch": micro, "accumulate": None}
        if bucket is not None:
            settings["trainer.ddp.bucket_mib"] = bucket
        if count is not None:
            settings["data.workers"] = count
        yield settings


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
    """Return the name under which trials share what the model gets wrong of them: the callbacks."""
    return "+".join(sorted(choice.callbacks)) or "plain"
