"""Measures unequal ranks: even shares of the batch beside those of `hetero_batch`, on one machine's CPUs.

    python -m scripts.bench.hetero [--quick] [--rounds 3] [--json FILE]

Three ranks have 0.1, 0.2 and 0.5 of a core, so their speeds are about 1 : 2 : 5. Control groups hold them to it, which
needs root and Linux. Without these, a rank sleeps for each sample, and the table says so. Each rank's own speed comes
from a run alone, beside the runs alone of the other ranks. A row's part is its speed over the sum of the own speeds.

In the last row the fastest rank has 0.2 of a core from the middle of the run on. The second half is timed, from the
fifth step after the change, beside the sum of the own speeds with the later cores. The bench takes about 12 minutes.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from scripts.bench.report import Goal, Row, at_least, parser, print_machine, report
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

CORES, LATER = (0.1, 0.2, 0.5), (0.1, 0.2, 0.2)
PERIOD_US = 10_000  # of a quota: short beside a micro-batch
SLEEP_S = 0.002  # of a core, for each sample, without control groups
BATCH, MICRO = 96, 4
SETTLED = 5  # steps until shares have followed the speeds


@dataclass(frozen=True)
class Case:
    """A run, and how its ranks are held."""

    name: str
    batch: int
    steps: int
    cores: tuple[float, ...]
    later: tuple[float, ...]  # from the middle of the run on
    hetero: bool = False
    alone: bool = False  # each rank has a run of its own
    tokens: int = 64
    width: int = 256


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
        x = torch.randn(384, self.case.tokens, self.case.width, generator=random)
        return TensorDataset(x) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.limit.sleep(len(batch[0]))
        return model(batch[0]).square().mean()


class Limit:
    """Holds this process to a part of a core.

    Args:
        group: Folder of a control group of its own; None: by sleeping.
    """

    def __init__(self, group: Path | None, cores: float) -> None:
        self.group, self.cores = group, cores
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        self.hold(cores)

    def hold(self, cores: float) -> None:
        self.cores = cores
        if self.group is None:
            return
        quota = int(cores * PERIOD_US)
        if (self.group / "cpu.max").exists():
            (self.group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self.group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.group / "cpu.cfs_quota_us").write_text(str(quota))

    def sleep(self, samples: int) -> None:
        if self.group is None:
            time.sleep(samples * SLEEP_S / self.cores)


class Times(Callback):
    """Notes the end of each step, and changes the limit in the middle of the run."""

    def __init__(self, case: Case, limit: Limit, later: float) -> None:
        self.case, self.limit, self.later = case, limit, later
        self.ends: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.ends.append(time.monotonic())
        if trainer.step == self.case.steps // 2:
            self.limit.hold(self.later)


def train(place: Place, case: Case, number: int, group: Path | None) -> float:
    """Return the samples per second of a run's second half, once it has settled."""
    torch.set_num_threads(1)
    limit = Limit(group, case.cores[number])
    times = Times(case, limit, case.later[number])
    callbacks: dict[str, Callback] = {"times": times}
    if case.hetero:
        callbacks["hetero_batch"] = HeteroBatch(every=2, smoothing=0.3)
    trainer = Trainer(
        Tokens(case, limit), callbacks, batch=case.batch, micro_batch=MICRO, place=place,
        options=Options(
            max_steps=case.steps, accelerator="cpu", log_every_steps=case.steps, run_dir=f"runs/{case.name}-{number}"
            if case.alone else f"runs/{case.name}", checkpoint=CheckpointOptions(every_steps=None), validate_every=None,
        ),
        data=DataOptions(workers=0),
    )  # fmt: skip
    trainer.fit()
    half = times.ends[case.steps // 2 + SETTLED :]
    return case.batch * (len(half) - 1) / (half[-1] - half[0])


def work(folder: str, place: Place, case: Case, number: int, group: Path | None, answer: Any) -> None:
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    answer.send(train(place, case, number, group))


def run(case: Case, groups: list[Path] | None) -> list[float]:
    """Run a case's ranks, each in a process of its own, and return the samples per second of each."""
    context, world = multiprocessing.get_context("spawn"), len(case.cores)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ranks: list[tuple[Any, Any]] = []
        try:
            for number in range(world):
                ours, theirs = context.Pipe(duplex=False)
                store = os.path.abspath(f"{folder}/store")
                place = Place() if case.alone else Place(number, world, number, world, store, "bench")
                group = groups[number] if groups else None
                process = context.Process(target=work, args=(folder, place, case, number, group, theirs))
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return [answer.recv() for _, answer in ranks]
        finally:
            for process, _ in ranks:
                process.join(10)
                process.kill()
                process.join()


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


def cases(steps: int) -> list[Case]:
    """List a round: the own speeds with both limits, then the rows of the table."""
    own = {"batch": 3 * MICRO, "alone": True}
    return [
        Case("own", steps=steps, cores=CORES, later=CORES, **own),
        Case("own, later", steps=steps, cores=LATER, later=LATER, **own),
        Case("even shares", BATCH, steps, CORES, CORES),
        Case("hetero_batch", BATCH, steps, CORES, CORES, hetero=True),
        Case("even shares, one rank slows down", BATCH, steps, CORES, LATER),
        Case("hetero_batch, one rank slows down", BATCH, steps, CORES, LATER, hetero=True),
    ]


def table(speeds: dict[str, list[list[float]]], held: str) -> tuple[list[Row], list[Goal]]:
    """Make the rows, of medians over rounds.

    Args:
        speeds: Of each case, a round's samples per second of each rank.
    """
    rows: list[Row] = []
    goals: list[Goal] = []
    part = f"samples per second, three ranks with {', '.join(map(str, CORES))} of a core, held by {held}"
    for name in (name for name in speeds if not name.startswith("own")):
        own = speeds["own, later" if "slows" in name else "own"]
        parts = [run[0] / sum(alone) for run, alone in zip(speeds[name], own, strict=True)]
        rows.append(
            {
                "part": part,
                "shares": name,
                "samples/s": statistics.median(run[0] for run in speeds[name]),
                "own speeds": " + ".join(f"{statistics.median(each):.3g}" for each in zip(*own, strict=True)),
                "of their sum": statistics.median(parts),
            }
        )
        if name.startswith("hetero_batch"):
            goals.append(at_least(f"{name}: part of the sum of the own speeds", 0.92, rows[-1]["of their sum"]))
    return rows, goals


def main() -> None:
    args = parser(
        "hetero", __doc__, "1 round of short runs: about 3 minutes", "of all cases; without it 3"
    ).parse_args()
    about = print_machine(("torch",))
    speeds: dict[str, list[list[float]]] = {}
    with control_groups(len(CORES)) as groups:
        for number in range(1 if args.quick else args.rounds or 3):
            for case in cases(20 if args.quick else 30):
                speeds.setdefault(case.name, []).append(run(case, groups))
                print(f"round {number + 1}, {case.name}: {', '.join(f'{each:.3g}' for each in speeds[case.name][-1])}")
        held = "control groups" if groups else "sleeping for each sample"
    rows, goals = table(speeds, held)
    report([rows], goals, about, args.json)


if __name__ == "__main__":
    command(main)
