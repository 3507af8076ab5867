"""Measures the links between the ranks of a search, and what codecs cost a rank, as `trainer.tools.bench` does."""

import hashlib
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch

from trainer.comm.codecs.base import Codec
from trainer.comm.ranks import Ranks
from trainer.composition import kinds
from trainer.cost.machine import CodecCost, Link, Machine
from trainer.cost.variant import Situation
from trainer.process.environment import Place, cores
from trainer.tools.cost_model.read import costs_of
from trainer.tools.measure import codecs as codec_costs
from trainer.tools.measure import collectives
from trainer.tools.measure.collectives import with_shares

# Bytes of the largest message, seconds of a size, about, and bytes of the smallest message. A size whose call takes
# longer is left out. Buckets of DDP and units of stage 3 are long: at 1 Gbit/s, messages of up to 2 MiB gave a rate
# that was 4 to 26 % too high. In a long all-gather of two ranks gloo's directions take turns.
COLLECTIVES = {
    collectives.FITTED: (16 << 20, 0.3, 4 << 10),
    "all_gather": (16 << 20, 0.15, 256 << 10),
    "reduce_scatter": (16 << 20, 0.15, 256 << 10),
}
BUSY, BUSY_SECONDS = 1 << 20, 0.5  # bytes that a thread hashes at a time, and for how long, to count cores
NO_LINK = Link(0.0, 1e12, 0.0)


def measure_links(
    place: Place, accelerator: str, backend: str, timeout_s: float, codecs: Mapping[str, Codec]
) -> dict[str, Any]:
    """Measure the links and codecs as this rank sees them. A collective.

    Returns:
        By level, "inside", "across" and "all", the fields of its link; by codec, the fields of its cost.
    """
    ranks = Ranks(place, accelerator, backend, timeout_s)
    levels, _, _ = collectives.make_levels(ranks)
    links: dict[str, Any] = {}
    for level in levels:
        fits = [
            collectives.fit(list(collectives.measure(ranks, level, name, *limits)), ranks.device)
            for name, limits in COLLECTIVES.items()
        ]
        links[level.name] = astuple(with_shares(*fits))
    ranks.gather(None)
    share = count_cores()
    costs = codec_costs.measure(ranks.device, codecs)
    backend = ranks.backend
    ranks.leave()
    gpu = torch.cuda.get_device_properties(ranks.device) if ranks.device.type == "cuda" else None
    return {
        "levels": links, "codecs": {name: astuple(cost) for name, cost in costs.items()}, "cores": share,
        "memory_bytes": gpu and float(gpu.total_memory),  # on a CPU, ranks share memory with everything else
        "gpu": gpu and gpu.name, "backend": backend,
    }  # fmt: skip


def codecs_of(config: Mapping[str, Any], place: Place, lossy: bool) -> dict[str, Codec]:
    """Return the codecs whose costs a search needs, by name: the config's, and those that callbacks offer."""
    at = Situation(place.world, place.world // place.local_world, blocks=0, step=0)
    offered = [{name: dict(knobs)} for name, kind in kinds().items() for knobs, _ in kind.variants(at)] if lossy else []
    allow = tuple(config["trainer"]["allow_targets"])
    costs = [cost for callbacks in [*offered, config["callbacks"]] for cost in costs_of(callbacks, allow).values()]
    return {cost.codec_name: cost.codec for cost in costs if cost and isinstance(cost.codec, Codec)}


def count_cores() -> float:
    """Return the cores that this rank gets while all ranks ask for as many as there are."""
    data = bytes(BUSY)
    began, worked = time.perf_counter(), time.process_time()
    end = began + BUSY_SECONDS

    def work() -> None:
        while time.perf_counter() < end:
            hashlib.sha256(data)  # without the interpreter's lock

    threads = [threading.Thread(target=work) for _ in range(cores())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.process_time() - worked) / (time.perf_counter() - began)


def make_machine(answers: list[dict[str, Any]], place: Place) -> Machine:
    """Return the machine of these ranks, from their results of `measure_links`.

    Their links are the same, because a collective waits for the slowest rank.
    """
    links = {level: Link(*fields) for level, fields in answers[0]["levels"].items()}
    every = links.get("all", NO_LINK)
    inside, across = links.get("inside"), links.get("across")
    costs = {
        name: CodecCost(*map(max, zip(*(answer["codecs"][name] for answer in answers), strict=True)))
        for name in answers[0]["codecs"]
    }
    memory = [answer["memory_bytes"] for answer in answers if answer["memory_bytes"] is not None]
    return Machine(
        place.world, place.local_world, statistics.mean(answer["cores"] for answer in answers),
        inside or across or every, across or inside or every, costs, min(memory, default=None), 1e9,
        answers[0]["backend"] != "gloo",
    )  # fmt: skip
