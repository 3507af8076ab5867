"""Measures collectives over message sizes as nccl-tests does, on the same process groups as training."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from trainer.comm.bandwidth import bandwidths
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import all_gather, reduce_scatter
from trainer.cost.machine import Link
from trainer.parallel.warmup import wait
from trainer.tools.measure.fit import fit_link
from trainer.tools.measure.host import Meter

FITTED = "all_reduce"  # its times give a level's link
ROUNDS, SLOW_ROUNDS = 5, 3  # a time is the median of so many; fewer if a single call is slow
MOST_CALLS = 200  # of a round
LEAST = 1 << 8  # bytes


@dataclass(frozen=True)
class Level:
    """Groups of ranks that use one level of the network; all groups of a level run at once."""

    name: str  # `inside` a node; `across` nodes, with one rank of each; or `all` ranks
    group: dist.ProcessGroup
    ranks: int  # per group
    meter: Meter  # of the machine, shared by all levels


@dataclass(frozen=True)
class Row:
    """The time of a collective."""

    level: str
    collective: str
    bytes: int
    seconds: float
    algbw: float
    busbw: float
    cpu_seconds: float  # mean over ranks of the CPU time that their threads report
    estimated: bool  # `cpu_seconds` is a share of the whole machine's instead, with interrupts
    ranks: int


def make_levels(ranks: Ranks) -> tuple[list[Level], int, list[str]]:
    """Return the network's levels, the ranks per node, and lines on what can't be measured. A collective."""
    if ranks.world == 1:
        return [], 1, ["links: not measured: one rank sends nothing; give --devices=2, or start by torchrun"]
    meter, places = Meter(ranks), ranks.gather([ranks.place.local_rank, ranks.place.local_world])
    per_node = places[0][1]
    if places != [[rank % per_node, per_node] for rank in range(ranks.world)]:
        line = "inside, across: not measured: nodes have unequal numbers of ranks, or ranks not in the order of nodes"
        return [Level("all", ranks.new_group(), ranks.world, meter)], 1, [line]
    nodes = torch.arange(ranks.world).view(-1, per_node)
    levels, lines = list[Level](), list[str]()
    for name, parts in (("inside", nodes), ("across", nodes.T)):
        if parts.shape[1] > 1:
            levels.append(Level(name, ranks.new_groups(parts.tolist()), parts.shape[1], meter))
        else:
            lines.append(f"{name}: not measured: {'a node has one rank' if name == 'inside' else 'there is one node'}")
    if len(levels) == 2:
        levels.append(Level("all", ranks.new_group(), ranks.world, meter))
    return levels, per_node, lines


def sizes(most: int, least: int = LEAST) -> list[int]:
    """Return `least` bytes and its doubles up to `most`; at least two sizes."""
    first = least.bit_length() - 1
    return [1 << n for n in range(first, max(first + 2, most.bit_length()))]


def measure(
    ranks: Ranks, level: Level, collective: str, most: int, budget_s: float, least: int = LEAST
) -> Iterator[Row]:
    """Measure a collective of each size, until one call takes longer than the budget. A collective.

    The calls of a round follow one another without a pause, as in nccl-tests, and after a call that is not timed. So a
    link's token bucket is empty, and the ranks begin together.

    Args:
        most, least: Bytes of the largest and smallest size, as nccl-tests counts them.
        budget_s: Approximate seconds for the timed calls of a size.
    """
    for number, size in enumerate(sizes(most, least)):
        elements = max(1, size // 4 // level.ranks) * level.ranks
        call = prepare(collective, level, elements, ranks.device)
        once = max(ranks.gather(min(run(call, 1, ranks.device)[0] for _ in range(2))))
        if number > 1 and once > budget_s:
            return
        calls = min(MOST_CALLS, max(1, int(budget_s / ROUNDS / once)))
        rounds = ROUNDS if calls > 1 else SLOW_ROUNDS
        began = level.meter.begin()
        own = [run(call, calls, ranks.device) for _ in range(rounds)]
        whole = level.meter.end(began)
        times, parts = zip(*ranks.gather([own, whole and whole / rounds / (calls + 1)]), strict=True)
        seconds = median(max(seconds for seconds, _ in each) for each in zip(*times, strict=True))
        known = median(mean(cpu for _, cpu in each) for each in zip(*times, strict=True))
        estimate = None if None in parts else mean(parts)
        algbw, busbw = bandwidths(collective, elements * 4, seconds, level.ranks)
        yield Row(
            level.name, collective, elements * 4, seconds, algbw, busbw,
            max(known, estimate or 0.0), estimate is not None, level.ranks,
        )  # fmt: skip


def prepare(collective: str, level: Level, elements: int, device: torch.device) -> Callable[[], Any]:
    flat = torch.zeros(elements, device=device)
    own = flat.new_zeros(elements // level.ranks)
    if collective == "all_reduce":
        return partial(dist.all_reduce, flat, group=level.group)
    if collective == "reduce_scatter":
        return partial(reduce_scatter, own, flat, level.group)
    if collective == "all_gather":
        return partial(all_gather, flat, own, level.group)
    return partial(dist.broadcast, flat, dist.get_process_group_ranks(level.group)[0], group=level.group)


def run(call: Callable[[], Any], calls: int, device: torch.device) -> tuple[float, float]:
    """Return the wall and CPU seconds per call, over `calls` calls."""
    call()
    wait(device)
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    wait(device)
    return (time.perf_counter() - began) / calls, (time.process_time() - worked) / calls


def fit(rows: Sequence[Row], device: torch.device) -> Link:
    """Fit a link to rows of one level and one collective. On a GPU, the host only waits, so its cost is 0."""
    cpu = {row.bytes: row.cpu_seconds for row in rows} if device.type == "cpu" else None
    return fit_link({row.bytes: row.seconds for row in rows}, rows[0].ranks, rows[0].collective, cpu)


def with_shares(link: Link, all_gather: Link, reduce_scatter: Link) -> Link:
    """Return the link with the rates of other collectives, relative to its own."""
    shares = (other.bytes_per_s / link.bytes_per_s for other in (all_gather, reduce_scatter))
    gather, scatter = (share if math.isfinite(share) and share else 1.0 for share in shares)
    return replace(link, all_gather=gather, reduce_scatter=scatter)
