"""Measures a pipeline of two stages against data parallelism on a slow link: a rank in each of two network namespaces.

    python -m scripts.bench.stages [--quick] [--rounds 5] [--json FILE]

Both train eight layers of 768 x 768, 4.7 million parameters, on batches of 64 samples. Data parallelism takes a rank's
32 samples at once; `1f1b` takes 8 micro-batches of 8. A ratio is the median of the ratios within each round, and rounds
alternate the order. Needs Linux, root and iproute2. The bench takes about 8 minutes.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from scripts.bench.report import Row, median_ratio, parser, print_machine, report
from scripts.cluster.netns import Cluster
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.pipeline import PipelineParallel
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

HOSTS, WIDTH, LAYERS, BATCH, MICROS = 2, 768, 8, 64, 8
RATES = {"no limit": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
RUNS: tuple[str, ...] = ("ddp", "1f1b")
SETTLED, STEPS = 2, 4  # steps before those that are timed, and these
ROOT = Path(__file__).parents[2]


class Chain(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recipe:
    def model(self) -> nn.Module:
        return Chain(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))

    def data(self, split: str) -> TensorDataset | None:
        return TensorDataset(torch.ones(BATCH, WIDTH)) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).square().mean()


class Times(Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.ends.append(time.monotonic())


def time_steps(
    recipe: Any, callbacks: Mapping[str, Callback], place: Place, batch: int, accumulate: int, settled: int, steps: int,
    **options: Any,
) -> float:  # fmt: skip
    """Return the seconds of a step: the mean of `steps`, after `settled` others."""
    times = Times()
    trainer = Trainer(
        recipe,
        {**callbacks, "times": times},
        batch=batch,
        accumulate=accumulate,
        options=Options(
            max_steps=settled + steps + 1, log_every_steps=10**6, check_replicas_every=10**6,
            checkpoint=CheckpointOptions(every_steps=10**6), **options,
        ),
        data=DataOptions(workers=0),
        place=place,
    )  # fmt: skip
    trainer.fit()
    return (times.ends[settled + steps - 1] - times.ends[settled - 1]) / steps  # the last step is logged: ranks meet


def train(place: Place, name: str) -> float:
    """Return the seconds of a step."""
    if name == "ddp":
        return time_steps(Recipe(), {}, place, BATCH, 1, SETTLED, STEPS)
    pipeline = PipelineParallel(cut=[LAYERS // 2])
    return time_steps(Recipe(), {"pipeline": pipeline}, place, BATCH, MICROS, SETTLED, STEPS)


def rank(folder: str, hosts: int, runs: Mapping[str, Callable[[Place], float]]) -> None:
    """Run each as a rank; write the times."""
    os.chdir(folder)
    torch.set_num_threads(1)
    number = int(os.environ["RANK"])
    times = {name: run(Place(number, hosts, 0, 1, f"{folder}/store-{name}", "bench")) for name, run in runs.items()}
    Path(f"{folder}/rank{number}.json").write_text(json.dumps(times))


def measure(cluster: Cluster, rate: str | None, module: str, words: Sequence[str]) -> dict[str, float]:
    """Return the seconds of a step in each way, on the slowest rank, of `module --rank FOLDER` with `words`."""
    with tempfile.TemporaryDirectory() as folder:
        cluster.shape(rate)
        env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with open(f"{folder}/log", "w") as log:
            argv = [sys.executable, "-m", module, "--rank", folder, *words]
            codes = cluster.run(argv, env=env, stdout=log, stderr=log)
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}: {Path(f'{folder}/log').read_text()[-2000:]}")
        found = [json.loads(Path(f"{folder}/rank{i}.json").read_text()) for i in range(cluster.hosts)]
    return {name: max(times[name] for times in found) for name in found[0]}


def table(times: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Return a row for each link: the times of a step, and their ratio, with its least and most."""
    rows: list[Row] = []
    for link, rounds in times.items():
        own, others = ([each[name] for each in rounds] for name in ("1f1b", "ddp"))
        ratios = [a / b for a, b in zip(own, others, strict=True)]
        row: dict[str, Any] = {"part": f"{HOSTS} ranks, {LAYERS} layers", "link": link}
        row |= {"ddp, ms a step": 1000 * median(others), "1f1b, ms a step": 1000 * median(own)}
        row |= {"1f1b to ddp": median_ratio(own, others), "least": min(ratios), "most": max(ratios)}
        rows.append(row)
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], HOSTS, {name: partial(train, name=name) for name in sys.argv[3:]})
        return 0
    args = parser("stages", __doc__, "one link, 1 round", "without it 5, or 1 if --quick").parse_args()
    about = print_machine(("torch",))
    links = {"100 Mbit/s": RATES["100 Mbit/s"]} if args.quick else RATES
    times: dict[str, list[dict[str, float]]] = {link: [] for link in links}
    with Cluster(HOSTS) as cluster:
        for n in range(args.rounds or (1 if args.quick else 5)):
            for link, rate in links.items():
                names = RUNS[:: -1 if n % 2 else 1]
                times[link].append(measure(cluster, rate, "scripts.bench.stages", names))
                print(f"round {n + 1}, {link}: {times[link][-1]}", file=sys.stderr)
    report([table(times)], [], about, args.json)
    return 0


if __name__ == "__main__":
    command(main)
