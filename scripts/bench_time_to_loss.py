"""Measures validation loss against wall time: BERT on text, 4 hosts of one rank, 100 Mbit/s. Linux, root, iproute2.

    python scripts/bench_time_to_loss.py [--quick] [--model 10M] [--steps 600] [--json FILE] [--svg FILE] [--real]

A curve over steps does not depend on the link, so each method trains once, on an unlimited link; a few of its steps are
timed on the slow one, by turns with all others and with steps that communicate nothing. Wall time is steps x seconds a
step: validation, and waiting for data, are not in it. --real trains on the slow link, and takes the times from there.

Methods have their default knobs, buckets and seeds as in bench_comm.py, and the same learning rate and steps, but for
those whose names end in `-longer`: they train for more steps than DDP (loss_rank.py), to reach its loss. Each curve
goes into the JSON when it is done; with a JSON that has some, what is missing is trained. Times are taken anew.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_report import Row as Cells
from bench_report import machine, report
from cluster import Cluster, Process, command
from comm_rows import Row
from comm_table import RATES
from comm_turns import Failed, Ranks
from loss_plot import plot
from loss_rank import CURVE, METHODS, SIZES, Text, timed
from loss_table import Curve, Outcome

from trainer.errors import ConfigError, nearest

HOSTS, RATE = 4, "100mbit"
QUICK = ("ddp", "powersgd", "local_sgd+int8")
TIMED_S = 4.0  # that a turn is timed for, about


class Hosts(Cluster):
    def popen(self, host: int, argv: Any, *args: Any, **kwargs: Any) -> Process:
        """comm_turns.py starts comm_rank.py; here the server of turns is loss_rank.py."""
        return super().popen(host, [argv[0], str(Path(__file__).with_name("loss_rank.py"))], *args, **kwargs)


@dataclass(frozen=True)
class Settings:
    model: str
    steps: int
    real: bool

    def title(self, rounds: int) -> str:
        size = SIZES[self.model]
        batch = f"batch {HOSTS} x {size.batch} x {size.sequence} tokens, {self.steps} steps, learning rate {size.lr:g}"
        unlimited = (
            "loss by steps on an unlimited link; wall time = steps x seconds a step, timed on the slow one: median of"
        )
        how = "trained on that link" if self.real else f"{unlimited} {rounds} rounds"
        return f"{self.model}, {HOSTS} hosts, {RATE}; {batch}; {how}"

    def expected_s(self, row: Row) -> float:
        """Of a step on the slow link."""
        text = Text(SIZES[self.model])
        with torch.device("meta"):
            shapes = [tuple(p.shape) for p in text.model().parameters()]
        sent = row.sends(shapes, HOSTS) if row.sends else 0.0
        return SIZES[self.model].compute_s * max(1.0, HOSTS / (os.cpu_count() or 1)) + sent / RATES[RATE]


class Record:
    """The JSON: the curves so far. What is in it for other settings is not overwritten."""

    def __init__(self, file: Path | None, settings: Settings) -> None:
        about = asdict(settings) | asdict(SIZES[settings.model])
        self.file, self.everything = file, {"settings": about, "curves": {}}
        if file is not None and file.exists():
            there = json.loads(file.read_text())
            if there.get("settings") != about:
                raise ConfigError(f"--json {file}: is of {there.get('settings')}, not of {about}; give another")
            self.everything["curves"] = there["curves"]

    @property
    def curves(self) -> dict[str, Curve]:
        return self.everything["curves"]

    def write(self, **more: Any) -> None:
        self.everything |= more
        if self.file is not None:
            partial = self.file.with_name(f"{self.file.name}.partial")
            partial.write_text(json.dumps(self.everything, indent=1) + "\n")
            partial.replace(self.file)


def train(ranks: Ranks, settings: Settings, name: str, record: Record) -> None:
    method = METHODS[name]
    steps = round(settings.steps * method.longer)
    patience_s = 60 + 20 * steps * settings.expected_s(method.row)
    rate = RATE if settings.real else "unlimited"
    turn = ranks.turn(settings.model, f"train {name}", rate, steps, patience_s, method.row.learns)
    record.curves[name] = json.loads((ranks.folder / CURVE).read_text())
    record.write()
    loss, sent = record.curves[name][-1][1], f"{turn['sent'] / 1e6:.3f} MB a step sent, with validations"
    print(f"{name}: loss {loss:.4f}, {turn['seconds'] * steps:.0f} s, {sent}", file=sys.stderr)


def time_step(ranks: Ranks, settings: Settings, name: str) -> float:
    row = timed(name)
    expected_s = settings.expected_s(row)
    steps = math.ceil(max(2, min(24, TIMED_S / expected_s)) / row.every) * row.every
    turn = ranks.turn(settings.model, f"time {name}", RATE, steps, 20 * (row.warm + steps) * expected_s, row.learns)
    print(f"{name or 'no communication'}: {turn['seconds']:.3f} s a step ({steps} steps)", file=sys.stderr)
    return turn["seconds"]


def run(
    settings: Settings, names: list[str], rounds: int, record: Record
) -> tuple[dict[str, list[float]], list[Cells]]:
    """Seconds of a step by round, of all that has a curve and, as "", without communication; what failed."""
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, Hosts(HOSTS) as cluster:
        ranks = Ranks(cluster, Path(folder))
        for name in names:
            if name not in record.curves:
                try:
                    train(ranks, settings, name, record)
                except Failed as error:
                    failed[name] = str(error)
        by_turns = [""] if settings.real else ["", *(name for name in names if name in record.curves)]
        seconds: dict[str, list[float]] = {name: [] for name in by_turns}
        for n in range(rounds):
            for name in list(seconds)[:: -1 if n % 2 else 1]:
                try:
                    seconds[name].append(time_step(ranks, settings, name))
                except Failed as error:
                    failed[name] = str(error)
                    del seconds[name]
    return seconds, [{"part": "Failed", "method": name, "error": error} for name, error in failed.items()]


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything there, and go on with what is there")
    made.add_argument("--svg", type=Path, metavar="FILE", help="write the plot there")
    made.add_argument("--quick", action="store_true", help="a tiny model, 90 steps, 3 methods: 4 minutes")
    made.add_argument("--real", action="store_true", help="train on the slow link: hours")
    made.add_argument("--model", choices=SIZES)
    made.add_argument("--steps", type=int)
    made.add_argument("--methods", help=f"separated by commas, of {', '.join(METHODS)}; ddp is always there")
    made.add_argument("--rounds", type=int, help="of the turns that time a step")
    return made.parse_args()


def main() -> int:
    args = options()
    names = args.methods.split(",") if args.methods else list(QUICK if args.quick else METHODS)
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"--methods {name}: no such method; {nearest(name, list(METHODS))}")
    names = [name for name in METHODS if name in names or name == "ddp"]
    steps = args.steps or (90 if args.quick else 600)
    settings = Settings(args.model or ("tiny" if args.quick else "10M"), steps, args.real)
    rounds = args.rounds or (2 if args.quick else 3)
    about = machine(("torch", "transformers"))
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ", end="\n\n")
    record = Record(args.json, settings)
    assert Text(SIZES[settings.model]).corpus  # prepared here, once
    seconds, failures = run(settings, names, rounds, record)
    if "" not in seconds or "ddp" not in (record.curves if args.real else seconds):  # nothing to compare with
        report([failures], [], about, None)
        return 1
    plain = {name: METHODS[name].plain for name in names}
    curves = {name: record.curves[name] for name in names if name in record.curves}
    outcome = Outcome(settings.title(rounds), steps, curves, seconds, plain, args.real)
    rows, goals = outcome.table(), outcome.goals()
    report([rows, failures] if failures else [rows], goals, about, None)
    record.write(machine=about, seconds=seconds, rows=rows, failures=failures, goals=[asdict(goal) for goal in goals])
    if args.svg:
        args.svg.write_text(plot(outcome.title, outcome.lines(), outcome.free_s(), outcome.loss("ddp")))
    return 0


if __name__ == "__main__":
    command(main)
