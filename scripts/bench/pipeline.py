"""Measures pipelines over slow links: `1f1b` beside `pipedream_2bw` (2bw), a stage in each host of network namespaces.

    python -m scripts.bench.pipeline [--quick] [--rounds 3] [--json FILE]

Four stages run eight micro-batches. A stage sleeps 40 ms forward and 80 ms backward, so cores that are busy disturb
little. A message has 1 MiB; links let 128 KiB of it through at once, and the rest takes 0, 10, 20 or 40 ms. Waiting is
the time of a step beyond the 960 ms that a stage works. Needs Linux, root and iproute2. It takes about 12 minutes.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.data import TensorDataset

from scripts.bench.report import Goal, Row, at_most, parser, print_machine, report
from scripts.cluster.netns import Cluster
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.pipeline import PipelineParallel
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

STAGES, MICROS = 4, 8
FORWARD_S, BACKWARD_S = 0.040, 0.080
WIDTH = 1 << 18  # 1 MiB
RATES = {"0 ms": None, "10 ms": "768mbit", "20 ms": "384mbit", "40 ms": "192mbit"}  # a message's time -> a link's rate
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "2bw": {"schedule": "pipedream_2bw"},
    "2bw, run_ahead=2": {"schedule": "pipedream_2bw", "run_ahead": 2},
}
SETTLED = 3  # steps before those that are timed
ROOT = Path(__file__).parents[2]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(BACKWARD_S)
        return grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Any = Sleep.apply(x + self.shift)
        return y


class Sleepers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recipe:
    def model(self) -> nn.Module:
        return Sleepers()

    def data(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.ones(MICROS, WIDTH)) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).mean()


class Times(Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.ends.append(time.monotonic())


def train(place: Place, knobs: dict[str, Any], steps: int) -> float:
    """Return the seconds of a step."""
    times = Times()
    cut = list(range(1, STAGES))
    trainer = Trainer(
        Recipe(),
        {"pipeline": PipelineParallel(STAGES, cut=cut, **knobs), "times": times},
        batch=MICROS,
        accumulate=MICROS,
        options=Options(
            max_steps=SETTLED + steps + 1, log_every_steps=10**6, clip_norm=1.0, check_replicas_every=10**6,
            checkpoint=CheckpointOptions(every_steps=10**6),
        ),
        data=DataOptions(workers=0),
        place=place,
    )  # fmt: skip
    trainer.fit()
    return (times.ends[SETTLED + steps - 1] - times.ends[SETTLED - 1]) / steps  # the last step is logged: ranks meet


def rank(folder: str, steps: int) -> None:
    """Train with each schedule as a rank; write the times."""
    os.chdir(folder)
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    times = {
        name: train(Place(number, STAGES, 0, 1, f"{folder}/store-{name}", "bench"), knobs, steps)
        for name, knobs in SCHEDULES.items()
    }
    Path(f"{folder}/rank{number}.json").write_text(json.dumps(times))


def measure(cluster: Cluster, rate: str | None, steps: int) -> dict[str, float]:
    """Return each schedule's seconds of a step, on the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        cluster.shape(rate)
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        words = [sys.executable, "-m", "scripts.bench.pipeline", "--rank", folder, str(steps)]
        with open(f"{folder}/log", "w") as log:
            codes = cluster.run(words, env=env, stdout=log, stderr=log)
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}: {Path(f'{folder}/log').read_text()[-2000:]}")
        found = [json.loads(Path(f"{folder}/rank{i}.json").read_text()) for i in range(STAGES)]
    return {name: max(times[name] for times in found) for name in SCHEDULES}


def table(times: dict[str, list[dict[str, float]]]) -> tuple[list[Row], list[Goal]]:
    rows: list[Row] = []
    work = MICROS * (FORWARD_S + BACKWARD_S)
    base, *others = SCHEDULES
    for message, rounds in times.items():
        row: Row = {"part": f"{STAGES} stages, {MICROS} micro-batches", "a message takes": message}
        for name in SCHEDULES:
            row[f"{name}, ms a step"] = 1000 * median(each[name] for each in rounds)
        for name in others:
            row[f"{name}, time"] = median(each[name] / each[base] for each in rounds)
            row[f"{name}, waiting"] = median((each[name] - work) / (each[base] - work) for each in rounds)
        rows.append(row)
    goals = [
        at_most(f"waiting of {name}, {row['a message takes']}", 0.43, row[f"{name}, waiting"])
        for row in rows
        for name in others
    ]
    return rows, goals


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], int(sys.argv[3]))
        return 0
    args = parser("pipeline", __doc__, "one rate, 5 steps, 1 round", "without it 3, or 1 if --quick").parse_args()
    about = print_machine(("torch",))
    rates = {"10 ms": RATES["10 ms"]} if args.quick else RATES
    rounds, steps = args.rounds or (1 if args.quick else 3), 5 if args.quick else 8
    times: dict[str, list[dict[str, float]]] = {message: [] for message in rates}
    with Cluster(STAGES) as cluster:
        for n in range(rounds):
            for message, rate in rates.items():
                times[message].append(measure(cluster, rate, steps))
                print(f"round {n + 1}/{rounds}, {message}: {times[message][-1]}", file=sys.stderr)
    rows, goals = table(times)
    report([rows], goals, about, args.json)
    return 0


if __name__ == "__main__":
    command(main)
