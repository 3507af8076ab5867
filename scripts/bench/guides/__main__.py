"""Measures what tuning guides claim, row by row, at the scale of one machine, and writes claimed beside measured.

    python -m scripts.bench.guides --json guides.json --out docs/measurements/guides.md     # about 12 minutes, idle
    python -m scripts.bench.guides --rows 'compression|overlap' --rounds 5 --json guides.json

Two hosts of a rank each are network namespaces, which need Linux, root and iproute2. In each round every way to train
that the chosen rows compare has a turn, and the next round turns their order round. A value is the median over rounds
of the ratio within a round. --json keeps the rounds. A further call with the same file measures the ways that lack
rounds, and its page has all rows.
"""

import argparse
import contextlib
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.bench import activations
from scripts.bench.comm.turns import Failed, Ranks
from scripts.bench.guides import rank
from scripts.bench.guides.rows import ROWS, Row, Turn, times
from scripts.bench.guides.ways import UNLIMITED, WAYS, Way, config_of
from scripts.bench.report import Row as Cells
from scripts.bench.report import machine_line, markdown, new_file, paragraphs, parser, print_machine
from scripts.cluster.netns import Cluster
from scripts.command import command
from trainer.errors import ConfigError
from trainer.files import write_whole

HOSTS, RATE, ROUNDS = 2, "2gbit", 5
SIZES = {"layers": 6, "hidden": 256, "sequence": 128, "batch": 16, "dropout": 0.1}  # of the rows of memory
PATIENCE_S = 120.0  # of a turn


class Record:
    """The rounds so far and the machines that they ran on, in a JSON file. A file of another rate is refused."""

    def __init__(self, file: Path | None, rate: str) -> None:
        self.file, self.rounds, self.machines, self.rate = file, list[dict[str, Turn]](), list[Cells](), rate
        if file is not None and file.exists():
            there = json.loads(file.read_text())
            if there["rate"] != rate:
                raise ConfigError(f"--json {file}: has rounds at {there['rate']}, not at {rate}; name another file")
            self.rounds, self.machines = there["rounds"], there["machines"]

    def lacking(self, rows: Iterable[Row], rounds: int) -> list[str]:
        """Return the ways of the rows that have fewer complete rounds than asked for, in the order of `WAYS`."""
        wanted = {way for row in rows if len(row.complete(self.rounds)) < rounds for way in row.ways}
        return [way for way in WAYS if way in wanted]

    def write(self) -> None:
        if self.file is not None:
            kept = {"rate": self.rate, "machines": self.machines, "rounds": self.rounds}
            write_whole(self.file, f"{json.dumps(kept, indent=1)}\n".encode())


def measure(rows: list[Row], rounds: int, record: Record) -> None:
    """Measure until each row has its rounds; a way that fails is told of, and not tried again."""
    failed: set[str] = set()
    with ranks_for(record.lacking(rows, rounds)) as ranks:
        for n in range(rounds):
            names = [name for name in record.lacking(rows, rounds) if name not in failed]
            if not names:
                return
            record.rounds.append({})
            for name in names[:: -1 if n % 2 else 1]:
                try:
                    found = take_turn(ranks, name, record.rate)
                except Failed as error:
                    failed.add(name)
                    print(f"round {n + 1}/{rounds}: {name} failed: {error}", file=sys.stderr)
                    continue
                record.rounds[-1][name] = found
                record.write()
                numbers = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
                print(f"round {n + 1}/{rounds}: {name}: {numbers}", file=sys.stderr)


@contextlib.contextmanager
def ranks_for(names: list[str]) -> Iterator[Ranks | None]:
    """Start the hosts, unless all ways are counted in this process."""
    if all(WAYS[name].run == "memory" for name in names):
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, Cluster(HOSTS) as cluster:
        yield Ranks(cluster, Path(folder), rank.__name__)


def take_turn(ranks: Ranks | None, name: str, rate: str) -> Turn:
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
            "part": f"Claimed and measured; a link of {record.rate}",
            "row": name,
            "config": " ".join(f"`{word}`" for word in row.config()) or "-",
            "beside": row.ways[1] if row.ways else "-",
            "claimed": row.claimed,
            "measured": row.measured(record.rounds),
            "rounds": len(row.complete(record.rounds)) if row.ways else "-",
            "why they differ": row.why,
        }
        for name, row in ROWS.items()
    ]


def page(record: Record) -> str:
    """Return the page of docs/measurements."""
    return paragraphs(
        "# What tuning guides claim, and what was measured",
        "Guides on the web promise speed-ups for training on a few GPUs. `python -m scripts.bench.guides` measures\n"
        "each claim that two CPU cores and gloo allow. A measured value is the median over rounds of the ratio\n"
        "within a round, with the least and the most of them. A speed-up is in samples a second.",
        f"Two hosts, a rank of one thread on each, are joined by a link of {record.rate}. They train BERT of 10\n"
        "million parameters on random tokens, 10 samples of 32 tokens a rank. The rows of unequal ranks have no limit\n"
        "of the link. There one rank sleeps as long as it computes. The rows of memory are one process, no link:\n"
        f"{', '.join(f'{name} {value}' for name, value in SIZES.items())}.",
        *limit(record),
        "Each config goes on `python -m trainer.main --config-dir scripts/bench/guides/conf recipe=tokens`, without "
        "observers.",
        *map(machine_line, record.machines),
        markdown(table(record)),
        "`DDP` is Echelon without callbacks, in torch's buckets. `one bucket` reduces all gradients after the\n"
        "backward pass. `one rank` is a loop of torch without peers. `each reduced` is a loop of torch's DDP without\n"
        "`no_sync`. `unequal` has even shares. `activations` recomputes nothing.",
    )


def limit(record: Record) -> list[str]:
    """Say what a step without communication would gain, if that was measured."""
    whole = ROWS["communication, before"].complete(record.rounds)
    if not whole:
        return []
    most = statistics.median(times("one rank", "DDP", "seconds", whole))
    return [f"A step of one rank alone is {most:.2f} times as fast as DDP's. No method on this link can gain more."]


def options() -> argparse.Namespace:
    made = parser("guides", __doc__, "2 rounds", f"of each way; without it {ROUNDS}")
    names = ", ".join(ROWS).replace("%", "%%")
    made.add_argument("--rows", default="", metavar="REGEX", help=f"search in names: {names}")
    made.add_argument("--rate", default=RATE, help=f"of each link, each way; without it {RATE}")
    made.add_argument("--out", type=new_file, metavar="FILE", help="write the page of Markdown to FILE")
    return made.parse_args()


def chosen(pattern: str) -> list[Row]:
    rows = [row for name, row in ROWS.items() if re.search(pattern, name)]
    if not rows:
        raise ConfigError(f"--rows {pattern}: fits none of {', '.join(ROWS)}")
    return rows


def main() -> int:
    args = options()
    rows, record = chosen(args.rows), Record(args.json, args.rate)
    about: dict[str, Any] = print_machine(("torch", "transformers"))
    rounds = args.rounds or (2 if args.quick else ROUNDS)
    if record.lacking(rows, rounds):
        record.machines.append(about)
        measure(rows, rounds, record)
    print(page(record))
    if args.out:
        args.out.write_text(page(record))
    return int(
        any(len(row.complete(record.rounds)) < rounds for row in itertools.compress(rows, (r.ways for r in rows)))
    )


if __name__ == "__main__":
    command(main)
