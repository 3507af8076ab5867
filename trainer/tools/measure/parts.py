"""Measures the parts of a bench on all ranks, into a report: links, codecs, copies, matmul, disk, shards."""

import argparse
from collections.abc import Callable
from statistics import mean
from typing import TypeVar

from trainer.comm.ranks import Ranks
from trainer.cost.machine import CodecCost
from trainer.errors import DataError, printable
from trainer.tools.measure import codecs as codec_costs
from trainer.tools.measure import collectives, device, storage
from trainer.tools.measure.report import HEAD, Report

Numbers = TypeVar("Numbers", float, list[float])


def links(ranks: Ranks, options: argparse.Namespace, report: Report) -> None:
    levels, report.per_node, lines = collectives.make_levels(ranks)
    for level in levels:
        report.say(f"\n{level.name}: {level.ranks} ranks in a group\n{HEAD}")
        for name in options.collectives:
            rows = []
            for row in collectives.measure(ranks, level, name, options.max_mib << 20, options.seconds):
                rows.append(row)
                report.add_row(row)
            report.add_fit(level.name, name, collectives.fit(rows, ranks.device))
            if len(rows) < len(collectives.sizes(options.max_mib << 20)):
                most = f"{level.name}, {name}: more than {rows[-1].bytes} bytes"
                lines.append(f"{most}: not measured: a call takes longer than --seconds={options.seconds:g}")
    if levels and not levels[0].meter.quiet and ranks.device.type == "cpu":
        load = f"the machine's processors were {levels[0].meter.load:.0%} busy before"
        lines.append(f"CPU us: without interrupts, which no process can see: {load}; measure on an idle machine")
    for line in lines:
        report.miss(line)


def codecs(ranks: Ranks, options: argparse.Namespace, report: Report) -> None:
    def measure() -> dict[str, list[float]]:
        costs = codec_costs.measure(ranks.device, codec_costs.by_name()).items()
        return {name: [cost.encode_s_per_byte, cost.decode_s_per_byte] for name, cost in costs}

    if each := on_each(ranks, report, "codecs", measure):
        costs = {name: map(mean, zip(*(own[name] for own in each), strict=True)) for name in each[0]}
        report.add_codecs({name: CodecCost(*cost) for name, cost in costs.items()})


def copies(ranks: Ranks, options: argparse.Namespace, report: Report) -> None:
    if ranks.device.type != "cuda":
        return report.miss("copies: not measured: there is no GPU to copy to")
    means(ranks, report, "copies", lambda: device.copies(ranks.device))


def matmul(ranks: Ranks, options: argparse.Namespace, report: Report) -> None:
    means(ranks, report, "matmul", lambda: device.matmul(ranks.device))


def means(ranks: Ranks, report: Report, part: str, measure: Callable[[], dict[str, float]]) -> None:
    if each := on_each(ranks, report, part, measure):
        report.add_numbers(part, {name: mean(own[name] for own in each) for name in each[0]})


def on_each(
    ranks: Ranks, report: Report, part: str, measure: Callable[[], dict[str, Numbers]]
) -> list[dict[str, Numbers]]:
    """Measure on all ranks at once; return by rank the numbers that all ranks have. A collective.

    Numbers that a rank lacks are reported as missing. After an error, such as a lack of memory, all numbers are.
    """
    own, why = dict[str, Numbers](), ""
    try:
        own = measure()
    except (RuntimeError, MemoryError) as error:
        why = printable((str(error).splitlines() or [""])[0]) or type(error).__name__
    each, reasons = zip(*ranks.gather([own, why]), strict=True)
    if any(reasons):
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        report.miss(f"{part}: not measured: rank {rank}: {reasons[rank]}")
        return []
    names = dict.fromkeys(name for numbers in each for name in numbers)
    lacking = {name: [str(rank) for rank, numbers in enumerate(each) if name not in numbers] for name in names}
    for name, without in lacking.items():
        if without:
            report.miss(f"{part}, {name}: not measured: rank {', '.join(without)} can't")
    return [{name: numbers[name] for name in names if not lacking[name]} for numbers in each]


def disk(ranks: Ranks, options: argparse.Namespace, report: Report) -> None:
    on_first(ranks, report, "disk", lambda: storage.disk(options.folder, options.disk_mib << 20))


def shards(ranks: Ranks, options: argparse.Namespace, report: Report) -> None:
    on_first(ranks, report, "shards", lambda: storage.shards(options.folder, options.shards))


def on_first(ranks: Ranks, report: Report, part: str, measure: Callable[[], dict[str, float]]) -> None:
    """Measure on rank 0 alone. A file that can't be read or written is reported."""
    numbers, why = dict[str, float](), ""
    if ranks.rank == 0:
        try:
            numbers = measure()
        except OSError as error:
            why = f"{error.filename or part}: {error.strerror or error}"
        except DataError as error:
            why = str(error)
    numbers, why = ranks.first([numbers, why])
    if why:
        return report.miss(f"{part}: not measured: {why}")
    report.add_numbers(part, numbers)


PARTS: dict[str, Callable[[Ranks, argparse.Namespace, Report], None]] = {
    each.__name__: each for each in (links, codecs, copies, matmul, disk, shards)
}
