"""Measures what tuning guides claim, row by row, at the scale of one machine.

    python -m scripts.bench.guides --json guides.json --out docs/measurements/guides.md     # about 12 minutes, idle
    python -m scripts.bench.guides --rows 'compression|overlap' --rounds 5 --json guides.json

Two hosts of a rank each are network namespaces, which need Linux, root and iproute2. In each round every way to train
that the chosen rows compare has a turn, and the next round turns their order round. A value is the median over rounds
of the ratio within a round. --json keeps the rounds. A further call with the same file measures the ways that lack
rounds, and its page has all rows.
"""

import argparse
import contextlib
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from scripts.bench import activations
from scripts.bench.guides import rank
from scripts.bench.guides.rows import ROWS, Row, times
from scripts.bench.guides.ways import UNLIMITED, WAYS, Way, config_of
from scripts.bench.harness import (
    Record,
    Rounds,
    Turn,
    machine_line,
    markdown,
    matching,
    paragraphs,
    parser,
    print_machine,
    write_page,
)
from scripts.bench.harness import Row as Cells
from scripts.bench.hosts import Ranks, ranks_in
from scripts.command import command

HOSTS, RATE, ROUNDS = 2, "2gbit", 5
SIZES = {"layers": 6, "hidden": 256, "sequence": 128, "batch": 16, "dropout": 0.1}  # of the rows of memory
PATIENCE_S = 120.0  # of a turn


def record_of(file: Path | None, rate: str) -> Record:
    return Record(file, {"rate": rate}, machines=[], rounds=[])


def lacking(rows: Iterable[Row], rounds: int, record: Record) -> list[str]:
    """Return the ways of the rows that have fewer complete rounds than asked for, in the order of `WAYS`."""
    wanted = {way for row in rows if len(row.complete(record["rounds"])) < rounds for way in row.ways}
    return [way for way in WAYS if way in wanted]


def measure(rows: list[Row], rounds: int, record: Record) -> None:
    """Measure until each row has its rounds. A way that fails is not tried again."""
    failed: dict[str, str] = {}
    limited = any(WAYS[name].run != "memory" for name in lacking(rows, rounds, record))
    with ranks_in(HOSTS, rank.__name__) if limited else contextlib.nullcontext() as ranks:
        for n in range(rounds):
            names = [name for name in lacking(rows, rounds, record) if name not in failed]
            if not names:
                return
            found = Rounds.of(names[:: -1 if n % 2 else 1])
            found.run(1, partial(take_turn, ranks, record["settings"]["rate"]), f"{n + 1}: ")
            failed |= found.failed
            record["rounds"].append({name: turns[0] for name, turns in found.turns.items()})
            record.write()


def take_turn(ranks: Ranks | None, rate: str, name: str) -> Turn:
    way = WAYS[name]
    if ranks is None or way.run == "memory":
        return keep(way)
    limit = rate if way.limited else UNLIMITED
    return ranks.turn(rank.SIZE, name, limit, way.timed, PATIENCE_S, way.learns and way.limited)


def keep(way: Way) -> Turn:
    """Count the MiB that a pass keeps, without and with weights and AdamW, and time the pass."""
    node = config_of(way.words)["callbacks"].get("activation_checkpoint", {})
    knobs = {key: value for key, value in node.items() if key != "_target_"}
    device = torch.device("cpu")
    recipe, data = activations.task(**SIZES, device=device)
    found = activations.count(recipe, data, knobs, device, 1)
    return {
        "seconds": found["ms"] / 1000, "kept": found["kept, MiB"], "whole": found["with weights and AdamW, MiB"],
    }  # fmt: skip


def table(record: Record) -> list[Cells]:
    return [
        {
            "part": f"Claimed and measured; a link of {record['settings']['rate']}",
            "row": name,
            "config": " ".join(f"`{word}`" for word in row.config()) or "-",
            "against": row.ways[1] if row.ways else "-",
            "claimed": row.claimed,
            "measured": row.measured(record["rounds"]),
            "rounds": len(row.complete(record["rounds"])) if row.ways else "-",
            "why they differ": row.why,
        }
        for name, row in ROWS.items()
    ]


def page(record: Record) -> str:
    return paragraphs(*limit(record), *map(machine_line, record["machines"]), markdown(table(record)))


def limit(record: Record) -> list[str]:
    whole = ROWS["communication, before"].complete(record["rounds"])
    if not whole:
        return []
    most = statistics.median(times("one rank", "DDP", "seconds", whole))
    return [f"A step of one rank alone is {most:.2f} times as fast as DDP's. No method on this link can gain more."]


def options() -> argparse.Namespace:
    made = parser(
        "guides", __doc__, "2 rounds", f"of each way; without it {ROUNDS}", "write the page of Markdown to FILE"
    )
    names = ", ".join(ROWS).replace("%", "%%")
    made.add_argument("--rows", default="", metavar="REGEX", help=f"search in names: {names}")
    made.add_argument("--rate", default=RATE, help=f"of each link, each way; without it {RATE}")
    return made.parse_args()


def chosen(pattern: str) -> list[Row]:
    return [ROWS[name] for name in matching("--rows", pattern, ROWS)]


def main() -> int:
    args = options()
    rows, record = chosen(args.rows), record_of(args.json, args.rate)
    about = print_machine(("torch", "transformers"))
    rounds = args.rounds or (2 if args.quick else ROUNDS)
    if lacking(rows, rounds, record):
        record["machines"].append(about)
        measure(rows, rounds, record)
    print(page(record))
    if args.out:
        write_page(args.out, page(record))
    return int(any(len(row.complete(record["rounds"])) < rounds for row in rows if row.ways))


if __name__ == "__main__":
    command(main)
