"""Measures what a codec of trainer/comm/codecs costs a rank, without a network: encoding, decoding, a whole mean.

    python -m scripts.bench.codecs [--quick] [--json FILE]

The gradients are those of a BERT of 24.3 million parameters. Times are ratios to copying the gradients into allocated
memory. A ratio is the median over rounds; each codec has a turn in every round. On a CPU, times are processor time of
one thread, so other processes count little. If there is a GPU, a second table has its times, taken with CUDA events.
The bench takes about 40 seconds on a CPU core.
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
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from scripts.bench.harness import Goal, Report, Rounds, Row, Turn, at_most, median_ratio, parser
from scripts.command import command
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec, ErrorFeedback
from trainer.comm.codecs.registry import CODECS
from trainer.comm.codecs.topk import TopK
from trainer.tools.measure.codecs import Nowhere

COPY = "a copy"
BUCKET_BYTES = 25 << 20  # DDP's
WARM = 3  # rounds that don't count: codecs allocate buffers, torch's PowerSGD sends two steps uncompressed


def shapes(width: int = 384, layers: int = 7, words: int = 30522, sequence: int = 512) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a BERT, without its head; by default 24.3 million parameters."""
    block = [(width, width), (width,)] * 4 + [(width,)] * 4
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(words, width), (sequence, width), (2, width), (width,), (width,), *block * layers]


def buckets(device: torch.device) -> list[tuple[Tensor, Bucket]]:
    """Make gradients in the order in which DDP packs them, with tails as heavy as those of real gradients."""
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


class SortedTopK(TopK):
    """Top-k with torch's `topk` and a sort of the indices, as most libraries have it."""

    def select(self, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        indices = flat.abs().topk(int(self.density * len(flat)), sorted=False).indices.sort().values
        return flat[indices], indices


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
        """Return the milliseconds of the device, or of all threads of this process, and the function's result."""
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
    """A codec with its state, and the buckets that all codecs share."""

    def __init__(self, codec: Codec, work: list[tuple[Tensor, Bucket]]) -> None:
        codec.join(2, 0, 0)
        self.bare, self.whole = codec, ErrorFeedback(codec) if codec.feedback else codec
        self.work, self.reduce = work, Nowhere(2)
        self.splits = type(codec).encode is not Codec.encode  # otherwise the codec has only a `mean`

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
    """One of torch's hooks, in a group of two ranks whose all-reduce is `instant`."""

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
    """Stand for an all-reduce over a network that takes no time."""
    done: Future[list[Tensor]] = Future(devices=[tensor.device] if tensor.is_cuda else [])
    done.set_result([tensor])
    return SimpleNamespace(get_future=lambda: done)


class GradBucket:
    """The part of torch's GradBucket that hooks use. Python code can't construct that class."""

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
    made = runners(work)

    def turn(name: str) -> Turn:
        if name != COPY:
            return made[name].round(flats, clock)
        return {"mean": sum(clock(flat.copy_, gradients)[0] for flat, (gradients, _) in zip(flats, work))}

    found = Rounds.of([COPY, *made]).run(WARM + rounds, turn)
    found = Rounds({name: turns[WARM:] for name, turns in found.turns.items()})
    copies = found.values(COPY, "mean")
    del found.turns[COPY]
    mb = sum(flat.nbytes for flat in flats) / 1e6
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread"
    part = f"{where}; a BERT's gradients, {mb:.1f} MB in {len(flats)} buckets; {rounds} rounds; "

    def ratio(key: str, name: str) -> float | str:
        return median_ratio(found.values(name, key), copies) if key in found.turns[name][0] else "-"

    def sends(name: str) -> float | str:
        reduce = made[name].reduce
        return reduce.bytes / 1e6 / mb if reduce else "-"

    return found.table(f"{part}1 is a copy: {statistics.median(copies):.2f} ms", "codec", {
        "sends, of float32": sends, "encode": partial(ratio, "encode"), "decode": partial(ratio, "decode"),
        "mean, all of it": partial(ratio, "mean"), "ms per 100 MB": lambda name: found.median(name, "mean") / mb * 100,
    })  # fmt: skip


def goals(rows: list[Row]) -> list[Goal]:
    ms = {row["codec"]: row["ms per 100 MB"] * 0.4 for row in rows}
    return [at_most(f"{name}, ms for 10M parameters", 37.5, ms[name]) for name in ("topk", "dgc") if name in ms]


def main() -> None:
    args = parser("codecs", __doc__, "5 rounds: about 15 seconds", "without it 21, or 5 if --quick").parse_args()
    torch.set_num_threads(1)
    with Report(args.json, ("torch", "numpy")) as report:
        for device in ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]:
            report.add(measure(torch.device(device), args.rounds or (5 if args.quick else 21)))
        report.goals = goals(report.tables[0])


if __name__ == "__main__":
    command(main)
