"""Measures unequal ranks: even shares of the batch beside those of `hetero_batch`, on one machine's CPUs.

    python -m scripts.bench.hetero [--quick] [--rounds 3] [--json FILE]

Three ranks have 0.2, 0.4 and 1.0 of a core, so their speeds are about 1 : 2 : 5. Run it on two idle cores. Control
groups hold the ranks, which needs root and Linux. Without these, a rank sleeps after each micro-batch, in proportion to
the CPU time that it has used, and the table says so.

A rank's own speed comes from a run of its own, with its part of the batch. All ranks have these runs at the same time.
A row's part is its speed over the sum of the own speeds of the same round.

In the last two rows the fastest rank has 0.4 of a core from a step on. Steps are timed from the twelfth after the
change on: after two measurements of four steps each, and three steps that were loaded before. The sum of the own speeds
is then that of the later cores. A round takes about four minutes.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from scripts.bench.harness import Goal, Report, Row, at_least, median_ratio, on_ranks, parser
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

CORES, LATER = (0.2, 0.4, 1.0), (0.2, 0.4, 0.4)
PERIOD_US = 10_000  # of a quota: short beside a micro-batch
WEIGHTS = {"cpu.shares": "262144", "cpu.weight": "10000"}  # the most, so that other processes take little
BATCH, MICRO = 1152, 4
EVERY = 4  # steps between two measurements of `hetero_batch`
SETTLED = 2 * EVERY + 3  # steps until the shares have followed a change


@dataclass(frozen=True)
class Case:
    """A run, and how its ranks are held."""

    name: str
    batch: int
    timed: int  # the last steps
    cores: tuple[float, ...]
    later: tuple[float, ...] = ()  # from step `EVERY + 2` on
    hetero: bool = False
    alone: bool = False  # each rank has a run of its own, with its part of the batch
    tokens: int = 128
    width: int = 128

    @property
    def steps(self) -> int:
        """The steps of the run; those that are not timed let shares and caches settle."""
        return self.timed + (SETTLED if self.hetero else 2) + (EVERY + 2 if self.later else 0)


class Tokens:
    """A small network on random vectors, with little to reduce for what it computes."""

    def __init__(self, case: Case, limit: "Limit") -> None:
        self.case, self.limit = case, limit

    def model(self) -> nn.Module:
        width = self.case.width
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(width, 1))

    def data(self, split: str) -> Dataset[Any] | None:
        random = torch.Generator().manual_seed(0)
        x = torch.randn(BATCH, self.case.tokens, self.case.width, generator=random)
        return TensorDataset(x) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.limit.sleep()
        return model(batch[0]).square().mean()


class Limit:
    """Holds this process to a part of a core.

    Args:
        group: Folder of a control group of its own; None: by sleeping.
    """

    def __init__(self, group: Path | None) -> None:
        self.group, self.cores, self.used = group, 1.0, 0.0
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            for name, most in WEIGHTS.items():
                if (group / name).exists():
                    (group / name).write_text(most)

    def hold(self, cores: float | None) -> None:
        """Hold the process to `cores`; None lets it go."""
        self.cores, self.used = cores or 1.0, time.process_time()
        if self.group is None:
            return
        quota = cores and int(cores * PERIOD_US)
        if (self.group / "cpu.max").exists():
            (self.group / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}")
        else:
            (self.group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.group / "cpu.cfs_quota_us").write_text(str(quota or -1))

    def sleep(self) -> None:
        """Without a control group, sleep for the CPU time since the last call: the process had `cores` of a core."""
        if self.group is None:
            time.sleep((time.process_time() - self.used) * (1 / self.cores - 1))
            self.used = time.process_time()


class Times(Callback):
    """Notes the end of each step, and changes the limit where the case says so."""

    def __init__(self, limit: Limit, later: float | None) -> None:
        self.limit, self.later = limit, later
        self.ends: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.ends.append(time.monotonic())
        if self.later and trainer.step == EVERY + 2:
            self.limit.hold(self.later)


def train(place: Place, case: Case, number: int, limit: Limit, run_dir: str) -> float:
    """Return the samples per second of the steps that are timed."""
    part = case.cores[number] / sum(case.cores)
    batch = MICRO * max(1, round(case.batch * part / MICRO)) if case.alone else case.batch
    times = Times(limit, case.later[number] if case.later else None)
    callbacks: dict[str, Callback] = {"times": times}
    if case.hetero:
        callbacks["hetero_batch"] = HeteroBatch(every=EVERY)
    trainer = Trainer(
        Tokens(case, limit), callbacks, batch=batch, micro_batch=MICRO, place=place,
        options=Options(
            max_steps=case.steps, accelerator="cpu", log_every_steps=case.steps, run_dir=run_dir,
            checkpoint=CheckpointOptions(every_steps=None), validate_every=None,
        ),
        data=DataOptions(workers=0),
    )  # fmt: skip
    limit.hold(case.cores[number])
    trainer.fit()
    limit.hold(None)
    timed = times.ends[-case.timed - 1 :]
    return batch * case.timed / (timed[-1] - timed[0])


def rank(place: Place, groups: list[Path] | None, rounds: int, timed: int) -> list[tuple[str, float]]:
    """Run the cases of each round as one of the ranks; return the samples per second of each run."""
    limit, found = Limit(groups[place.rank] if groups else None), []
    imports = Case("imports", 24, 1, (1.0, 1.0, 1.0), hetero=True)
    for number, case in enumerate([imports, *(cases(timed) * rounds)]):
        own = Place() if case.alone else replace(place, store=f"{place.store}-{number}")
        run_dir = f"runs/{number}-{place.rank}" if case.alone else f"runs/{number}"
        found.append((case.name, train(own, case, place.rank, limit, run_dir)))
        if not place.rank:
            print(f"{case.name}: {found[-1][1]:.3g} samples/s of rank 0", file=sys.__stderr__, flush=True)
    return found[1:]


@contextmanager
def control_groups(count: int) -> Iterator[list[Path] | None]:
    """Make control groups with a limit of CPU time; None if the system does not let this process make them."""
    roots = [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup")]
    made: list[Path] = []
    try:
        with suppress(OSError):
            for root in roots:
                group = root / f"echelon-hetero-{os.getpid()}-0"
                if not (root / "cgroup.procs").exists():
                    continue
                group.mkdir()
                made.append(group)
                if (group / "cpu.max").exists() or (group / "cpu.cfs_quota_us").exists():
                    for number in range(1, count):
                        made.append(root / f"echelon-hetero-{os.getpid()}-{number}")
                        made[-1].mkdir()
                    break
                made.pop().rmdir()
        yield made if len(made) == count else None
    finally:
        for group in made:
            with suppress(OSError):
                group.rmdir()


def cases(timed: int) -> list[Case]:
    """List a round: the own speeds with each limit, followed by the rows of the table that they belong to.

    Args:
        timed: Steps of a run that count.
    """
    few = -(-timed // 3)  # even shares take long
    return [
        Case("own", BATCH, timed, CORES, alone=True),
        Case("hetero_batch", BATCH, timed, CORES, hetero=True),
        Case("even shares", BATCH, few, CORES),
        Case("own, later", BATCH, timed, LATER, alone=True),
        Case("hetero_batch, one rank slows down", BATCH, timed, CORES, LATER, hetero=True),
        Case("even shares, one rank slows down", BATCH, few, CORES, LATER),
    ]


def table(speeds: dict[str, list[list[float]]], held: str) -> tuple[list[Row], list[Goal]]:
    """Make the rows, of medians over rounds.

    Args:
        speeds: Of each case, a round's samples per second of each rank.
    """
    rows, goals = list[Row](), list[Goal]()
    part = f"samples per second, three ranks with {', '.join(map(str, CORES))} of a core, held by {held}"
    for name in (name for name in speeds if not name.startswith("own")):
        own = speeds["own, later" if "slows" in name else "own"]
        rows.append({
            "part": part, "shares": name, "samples/s": statistics.median(run[0] for run in speeds[name]),
            "own speeds": " + ".join(f"{statistics.median(each):.3g}" for each in zip(*own, strict=True)),
            "of their sum": median_ratio([run[0] for run in speeds[name]], map(sum, own)),
        })  # fmt: skip
        if name.startswith("hetero_batch"):
            goals.append(at_least(f"{name}: part of the sum of the own speeds", 0.92, rows[-1]["of their sum"]))
    return rows, goals


def main() -> None:
    words = "1 round of short runs: about 2 minutes", "of all cases; without it 3"
    args = parser("hetero", __doc__, *words).parse_args()
    rounds, timed = (1, 4) if args.quick else (args.rounds or 3, 12)
    with Report(args.json) as report, control_groups(len(CORES)) as groups:
        speeds: dict[str, list[list[float]]] = {}
        for runs in zip(*on_ranks(len(CORES), rank, groups, rounds, timed), strict=True):
            speeds.setdefault(runs[0][0], []).append([speed for _, speed in runs])
        report.add(*table(speeds, "control groups" if groups else "sleeping for the CPU time they used"))


if __name__ == "__main__":
    command(main)
