"""Measures what a codec of trainer/comm/codecs costs a rank, without a network: encoding, decoding, all of a mean.

    python scripts/bench_codecs.py [--quick] [--json FILE]

Times are ratios to a copy of the same gradients into memory that is there: medians over rounds, all rows by turns in
each. Processor time of one thread on a CPU, so that neighbours count little; a GPU's own events tell its times.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_report import Goal, Row, at_most, machine, parser, report
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec, ErrorFeedback
from trainer.comm.codecs.registry import CODECS
from trainer.comm.codecs.topk import TopK
from trainer.comm.reduce import AllReduce

BUCKET_BYTES = 25 << 20  # DDP's
WARM = 3  # rounds that don't count: codecs make what they keep, torch's PowerSGD sends two steps as they are


def shapes(width: int = 384, layers: int = 7, words: int = 30522) -> list[tuple[int, ...]]:
    """Of a BERT of 24.3M parameters."""
    block = [(width, width), (width,)] * 4 + [(width,)] * 4
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(words, width), (512, width), (2, width), (width,), (width,), *block * layers]


def buckets(device: torch.device) -> list[tuple[Tensor, Bucket]]:
    """Gradients in the order in which DDP packs them, with tails as heavy as gradients have."""
    groups: list[list[Tensor]] = [[]]
    for shape in reversed(shapes()):
        if sum(p.nbytes for p in groups[-1]) >= BUCKET_BYTES:
            groups.append([])
        groups[-1].append(torch.empty(shape, device=device))
    packed = []
    generator = torch.Generator(device).manual_seed(0)
    for group in groups:
        flat = torch.empty(sum(p.numel() for p in group), device=device).normal_(generator=generator)
        flat *= torch.empty_like(flat).normal_(generator=generator).exp_()
        packed.append((flat, Bucket.of(group, step=1)))
    return packed


class Nowhere(AllReduce):
    """Two ranks, of which the other has the same payloads, and a network that takes no time."""

    def __init__(self) -> None:
        self.size, self.bytes = 2, 0

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        self.bytes += flat.nbytes
        return flat

    def gather(self, own: Tensor) -> Tensor:
        self.bytes += own.nbytes
        return torch.stack([own, own])

    def swap(self, rows: Tensor) -> Tensor:
        self.bytes += rows.nbytes
        return rows.clone()


class SortedTopK(TopK):
    """TopK as it is mostly written."""

    def select(self, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        indices = flat.abs().topk(int(self.density * len(flat)), sorted=False).indices.sort().values
        return flat[indices], indices


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
        """Milliseconds of this process, all of its threads, and what it returned."""
        if self.device.type == "cpu":
            began = time.process_time()
            result = function(*args)
            return (time.process_time() - began) * 1e3, result
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        result = function(*args)
        end.record()
        end.synchronize()
        return start.elapsed_time(end), result


class Runner:
    """The same buckets for one codec: its state, and the times of each round."""

    def __init__(self, codec: Codec, work: list[tuple[Tensor, Bucket]]) -> None:
        codec.join(2, 0, 0)
        self.bare, self.whole = codec, ErrorFeedback(codec) if codec.feedback else codec
        self.work, self.reduce = work, Nowhere()
        self.splits = type(codec).encode is not Codec.encode  # else it has a `mean` only

    def round(self, flats: list[Tensor], clock: Clock) -> dict[str, float]:
        times, self.reduce.bytes = dict.fromkeys(["encode", "decode", "mean"] if self.splits else ["mean"], 0.0), 0
        for (gradients, bucket), flat in zip(self.work, flats, strict=True):
            flat.copy_(gradients)
            if self.splits:
                ms, payload = clock(self.bare.encode, flat, bucket)
                times["encode"] += ms
                times["decode"] += clock(self.bare.decode, payload, flat, 1.0, bucket)[0]
                flat.copy_(gradients)
            times["mean"] += clock(self.whole.mean, flat, flat, bucket, self.reduce)[0]
        return times


class HookRunner:
    """One of torch's hooks, in a group of two that `instant` stands in for."""

    def __init__(self, hook: Callable[[Any], Any], work: list[tuple[Tensor, Bucket]]) -> None:
        self.hook, self.work, self.reduce = hook, work, None

    def round(self, flats: list[Tensor], clock: Clock) -> dict[str, float]:
        total, last = 0.0, len(flats) - 1
        for index, ((gradients, bucket), flat) in enumerate(zip(self.work, flats, strict=True)):
            flat.copy_(gradients)
            total += clock(self.call, GradBucket(flat, bucket, index, index == last))[0]
        return {"mean": total}

    def call(self, bucket: "GradBucket") -> None:
        with mock.patch.object(dist, "all_reduce", instant):
            self.hook(bucket).wait()


def instant(tensor: Tensor, **_: Any) -> SimpleNamespace:
    """An all-reduce over a network that takes no time."""
    done: Future[list[Tensor]] = Future(devices=[tensor.device] if tensor.is_cuda else [])
    done.set_result([tensor])
    return SimpleNamespace(get_future=lambda: done)


class GradBucket:
    """As much of torch's as its hooks ask for; that one can't be made in Python."""

    def __init__(self, flat: Tensor, bucket: Bucket, index: int, last: bool) -> None:
        self.buffer, self.index, self.is_last = lambda: flat, lambda: index, lambda: last
        self.gradients = lambda: bucket.split(flat)


def runners(work: list[tuple[Tensor, Bucket]]) -> dict[str, Runner | HookRunner]:
    ours = {name: Runner(codec(), work) for name, codec in CODECS.items()}
    group: Any = SimpleNamespace(size=lambda: 2)
    state = PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    hooks = {
        "torch's bf16 hook": partial(bf16_compress_hook, group),
        "torch's fp16 hook": partial(fp16_compress_hook, group),
        "torch's PowerSGD hook, rank 1": partial(powerSGD_hook, state),
    }
    theirs = {name: HookRunner(hook, work) for name, hook in hooks.items()}
    return {**ours, **theirs, "top-k that sorts": Runner(SortedTopK(), work)}


def measure(device: torch.device, rounds: int) -> list[Row]:
    work, clock = buckets(device), Clock(device)
    flats = [torch.zeros_like(gradients) for gradients, _ in work]
    copies: list[float] = []
    runs: dict[str, list[dict[str, float]]] = {}
    made = runners(work)
    for _ in range(WARM + rounds):
        copies.append(sum(clock(flat.copy_, gradients)[0] for flat, (gradients, _) in zip(flats, work)))
        for name, runner in made.items():
            runs.setdefault(name, []).append(runner.round(flats, clock))
    megabytes = sum(flat.nbytes for flat in flats) / 1e6
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    copy_ms = statistics.median(copies[WARM:])
    part = f"{where}; a BERT's gradients, {megabytes:.1f} MB in {len(flats)} buckets; {rounds} rounds; "
    part += f"1 is a copy: {copy_ms:.2f} ms"
    return [row(part, name, made[name], runs[name][WARM:], copies[WARM:], megabytes) for name in made]


def row(
    part: str, name: str, runner: Runner | HookRunner, times: list[dict[str, float]], copies: list[float], mb: float
) -> Row:
    """A dash where there is no such part, or no telling."""

    def ratio(key: str) -> float | str:
        return statistics.median(t[key] / c for t, c in zip(times, copies, strict=True)) if key in times[0] else "-"

    return {
        "part": part,
        "codec": name,
        "sends, of float32": runner.reduce.bytes / 1e6 / mb if runner.reduce else "-",
        "encode": ratio("encode"),
        "decode": ratio("decode"),
        "mean, all of it": ratio("mean"),
        "ms per 100 MB": statistics.median(t["mean"] for t in times) / mb * 100,
    }


def goals(rows: list[Row]) -> list[Goal]:
    """A step of 0.25 s on 10M parameters loses less than 15 %."""
    ms = {row["codec"]: row["ms per 100 MB"] * 0.4 for row in rows}
    return [at_most(f"{name}, ms for 10M parameters", 37.5, ms[name]) for name in ("topk", "dgc") if name in ms]


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    about = machine(["torch", "numpy"])
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ", end="\n\n")
    devices = ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]
    tables = [measure(torch.device(device), 5 if args.quick else 21) for device in devices]
    report(tables, goals(tables[0]), about, args.json)


if __name__ == "__main__":
    main()
