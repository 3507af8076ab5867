"""Measures the links between the ranks of a search, and what codecs cost a rank, by small collectives."""

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec
from trainer.comm.codecs.registry import make
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.parallel.warmup import wait
from trainer.process.environment import Place, cores
from trainer.tools.cost_model.machine import CodecCost, Link, Machine

SIZES = (256 << 10, 2 << 20)  # bytes: two messages of a bucket's kind, whose difference gives the bandwidth
EMPTY = 64  # messages of 4 bytes, of which the fastest quarter gives the latency
ROUNDS = 3
CODECS = ("bf16", "fp16", "int8", "topk", "powersgd")
ELEMENTS = 1 << 20  # of the bucket that a codec encodes
BUSY, BUSY_SECONDS = 1 << 20, 0.5  # bytes that a thread hashes at a time, and for how long, to count cores
NO_LINK = Link(0.0, 1e12, 0.0)


def measure_links(place: Place, accelerator: str, backend: str, timeout_s: float, codecs: bool) -> dict[str, Any]:
    """Measure the links and codecs as this rank sees them. A collective.

    Returns:
        By level, "inside" and "across": the ranks of the group and seconds by bytes. By codec: seconds per byte.
    """
    ranks = Ranks(place, accelerator, backend, timeout_s)
    per_node, nodes = place.local_world, place.world // place.local_world
    levels: dict[str, Any] = {}
    parts = {"inside": [[n * per_node + i for i in range(per_node)] for n in range(nodes)]}
    parts["across"] = [[n * per_node + i for n in range(nodes)] for i in range(per_node)]
    for level, groups in parts.items():
        if len(groups[0]) > 1:
            group = ranks.new_groups(groups)
            ranks.gather(None)
            levels[level] = {"ranks": len(groups[0]), **time_level(group, ranks)}
    ranks.gather(None)
    share = count_cores()
    costs = {name: time_codec(name, ranks.device) for name in CODECS} if codecs else {}
    ranks.leave()
    gpu = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else None
    return {"levels": levels, "codecs": costs, "cores": share, "memory_bytes": memory_of(ranks.device), "gpu": gpu}


def time_level(group: dist.ProcessGroup, ranks: Ranks) -> dict[str, Any]:
    """Return the seconds of an empty all-reduce and of two sizes, and the processor seconds of a sent byte."""
    small = torch.zeros(1, device=ranks.device)
    empty = sorted(time_all_reduce(small, group, ranks.device) for _ in range(EMPTY))[EMPTY // 4]
    seconds: dict[int, float] = {}
    cpu_s = 0.0  # of the last size
    for size in SIZES:
        flat = torch.zeros(size // 4, device=ranks.device)
        time_all_reduce(flat, group, ranks.device)
        worked = time.process_time()
        seconds[size] = sorted(time_all_reduce(flat, group, ranks.device) for _ in range(ROUNDS))[ROUNDS // 2]
        cpu_s = (time.process_time() - worked) / ROUNDS
    sent = 2 * (group.size() - 1) / group.size() * SIZES[-1]
    return {"empty_s": empty, "seconds": seconds, "cpu_s_per_byte": cpu_s / sent if ranks.device.type == "cpu" else 0.0}


def time_all_reduce(flat: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    dist.all_reduce(flat, group=group)
    wait(device)
    return time.perf_counter() - began


def time_codec(name: str, device: torch.device) -> dict[str, float]:
    """Return the seconds of a codec for each byte of gradient: to encode, and to decode one payload."""
    codec = make(name, {})
    codec.join(*(2, 0, 0))
    weight = torch.zeros(1024, ELEMENTS // 1024, device=device)
    bucket, flat, out = Bucket.of([weight], 1), torch.randn_like(weight).view(-1), torch.zeros_like(weight).view(-1)
    size = 4.0 * ELEMENTS
    if type(codec).encode is Codec.encode:  # it has a `mean` alone
        return {"encode": fastest(lambda: codec.mean(flat, out, bucket, Nowhere()), device) / size, "decode": 0.0}
    encode_s = fastest(lambda: codec.encode(flat, bucket), device)
    payload = codec.encode(flat, bucket)
    return {
        "encode": encode_s / size,
        "decode": fastest(lambda: codec.decode(payload, out, 1.0, bucket), device) / size,
    }


class Nowhere(AllReduce):
    """An all-reduce of two ranks with the same payloads, over a network that takes no time."""

    def __init__(self) -> None:
        self.size = 2

    def __call__(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        return flat

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, own])

    def swap(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()


def fastest(run: Callable[[], Any], device: torch.device) -> float:
    took: list[float] = []
    for _ in range(1 + ROUNDS):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        took.append(time.perf_counter() - began)
    return min(took[1:])


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


def memory_of(device: torch.device) -> float | None:
    """Return the bytes of a GPU; None on a CPU, whose ranks share memory with everything else."""
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def fit(level: Mapping[str, Any]) -> Link:
    """Return the link that explains the seconds of a ring all-reduce: 2 (N - 1) messages of a part of the bytes."""
    ranks, rounds = level["ranks"], 2 * (level["ranks"] - 1)
    (low, first), (high, last) = sorted((int(size), seconds) for size, seconds in level["seconds"].items())
    slope = (last - first) / (high - low)
    slope = slope if slope > 0 else last / high
    return Link(level["empty_s"] / rounds, rounds / ranks / slope, level["cpu_s_per_byte"])


def make_machine(answers: list[dict[str, Any]], place: Place) -> Machine:
    """Return the machine that the slowest rank sees: a collective waits for it.

    Args:
        answers: Of `measure_links`, by rank.
    """
    links = {level: slowest([answer["levels"][level] for answer in answers]) for level in answers[0]["levels"]}
    inside, across = links.get("inside"), links.get("across")
    costs = {
        name: CodecCost(*(max(answer["codecs"][name][part] for answer in answers) for part in ("encode", "decode")))
        for name in answers[0]["codecs"]
    }
    memory = [answer["memory_bytes"] for answer in answers if answer["memory_bytes"] is not None]
    return Machine(
        place.world, place.local_world, statistics.mean(answer["cores"] for answer in answers),
        inside or across or NO_LINK, across or inside or NO_LINK,
        costs, min(memory, default=None), 1e9,
    )  # fmt: skip


def slowest(levels: list[dict[str, Any]]) -> Link:
    links = [fit(level) for level in levels]
    return Link(
        max(link.latency_s for link in links),
        min(link.bytes_per_s for link in links),
        max(link.cpu_s_per_byte for link in links),
    )
