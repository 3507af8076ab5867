"""Counts what a rank holds under each stage of `shard`, and times its steps beside DDP's.

    python -m scripts.bench.sharding [--quick] [--rounds 5] [--json FILE]

Bytes are those of the fullest rank, with each stage of `shard`, with `optimizer_in_backward` and with `auto_batch`.
Gradients are counted after the backward pass, without the buckets that DDP has beside them. AdamW trains a network of
square layers in float32. The ranks are processes of this machine. With fewer cores than ranks, times tell what a
callback adds to a step, and nothing about a network. In each round every way has a run, in an order that turns. A ratio
is the median over rounds of the ratio to DDP in the same round. It took 13 minutes on 2 busy CPU cores.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from scripts.bench.report import Row, median_ratio, parser, print_machine, report
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.auto_batch import AutoBatch
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.shard.callback import Shard
from trainer.comm.slices import local
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.batch import Step
from trainer.optim.factories import adamw
from trainer.parallel.forward_backward import ForwardBackward
from trainer.process.environment import Place
from trainer.trainer import Trainer

KIB = 2**10
WARM = 3  # steps of a run that are not timed
WAYS: dict[str, Callable[[], Callback | None]] = {
    "DDP": lambda: None,
    "shard stage=1": lambda: Shard(1),
    "shard stage=2": lambda: Shard(2),
    "shard stage=3": lambda: Shard(3),
    "shard stage=3 reshard=false": lambda: Shard(3, reshard=False),
    "optimizer_in_backward": OptimizerInBackward,
    "auto_batch": AutoBatch,
}


class Squares:
    """Blocks of square layers with biases, on random vectors."""

    def __init__(self, width: int, depth: int, tokens: int) -> None:
        self.width, self.depth, self.tokens = width, depth, tokens

    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(self.depth)]
        return nn.Sequential(nn.Linear(self.width, self.width), Chain(blocks), nn.Linear(self.width, 16))

    def data(self, split: str) -> Any:
        random = torch.Generator().manual_seed(0)
        x = torch.randn(64, self.tokens, self.width, generator=random)
        return TensorDataset(x) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).square().mean()


class Chain(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Counts(Callback):
    """The bytes that this rank holds, and the seconds of each step."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.ends: list[float] = []

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        def counted(data: Step, total: Callable[[], int]) -> list[Tensor]:
            losses = run(data, total)
            self.bytes["gradients"] = sum(local(p.grad).nbytes for p in trainer.parameters if p.grad is not None)
            return losses

        return counted

    def on_step_end(self, trainer) -> None:
        self.ends.append(time.monotonic())
        self.bytes["parameters"] = sum(local(p.detach()).nbytes for p in trainer.parameters)
        states = trainer.optimizer.state.values()
        self.bytes["optimizer state"] = sum(local(v).nbytes for state in states for v in state.values() if v.dim())


def train(place: Place, recipe: Squares, way: str, name: str, steps: int) -> tuple[dict[str, int], float]:
    """Return this rank's bytes, and its median seconds of a step."""
    own, counts = WAYS[way](), Counts()
    Trainer(
        recipe, {"counts": counts, **({"own": own} if own else {})}, adamw, batch=4 * place.world,
        place=Place(place.rank, place.world, place.rank, place.world, f"{place.store}-{name}", "bench"),
        data=DataOptions(workers=0),
        options=Options(
            max_steps=steps + WARM, accelerator="cpu", log_every_steps=1000, run_dir=f"runs/{name}",
            checkpoint=CheckpointOptions(every_steps=None),
        ),
    ).fit()  # fmt: skip
    ends = counts.ends[WARM - 1 :]
    return counts.bytes, statistics.median(after - before for before, after in pairwise(ends))


def rounds_of(place: Place, recipe: Squares, rounds: int, steps: int) -> list[dict[str, tuple[dict[str, int], float]]]:
    """Return what `train` returns for each way, in each round."""
    found = []
    for number in range(rounds):
        ways = [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]
        found.append({way: train(place, recipe, way, f"{number}-{ways.index(way)}", steps) for way in ways})
    return found


def work(folder: str, place: Place, answer: Any, *arguments: Any) -> None:
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
    answer.send(rounds_of(place, *arguments))


def run(world: int, *arguments: Any) -> list[list[dict[str, tuple[dict[str, int], float]]]]:
    """Run `rounds_of` on each rank, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        ranks: list[tuple[Any, Any]] = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                place = Place(rank, world, rank, world, str(Path(folder, "store").absolute()), "bench")
                process = context.Process(target=work, args=(folder, place, theirs, *arguments))
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return [answer.recv() for _, answer in ranks]
        finally:
            for process, _ in ranks:
                process.join(10)
                process.kill()
                process.join()


def table(world: int, ranks: list[list[dict[str, tuple[dict[str, int], float]]]]) -> list[Row]:
    """Make a row for each way, from the rounds of each rank."""
    seconds = {way: [each[way][1] for each in ranks[0]] for way in WAYS}
    rows = []
    whole = fullest(ranks, "DDP")
    for way in WAYS:
        held = fullest(ranks, way)
        rows.append(
            {
                "part": f"{world} ranks",
                "callback": way,
                **{f"{kind}, KiB": held[kind] / KIB for kind in ("parameters", "gradients", "optimizer state")},
                "sum, of DDP": sum(held.values()) / sum(whole.values()),
                "step, of DDP": median_ratio(seconds[way], seconds["DDP"]),
            }
        )
    return rows


def fullest(ranks: list[list[dict[str, tuple[dict[str, int], float]]]], way: str) -> dict[str, int]:
    """Return the bytes of the rank that has the most."""
    return max((rank[0][way][0] for rank in ranks), key=lambda held: sum(held.values()))


def main() -> None:
    args = parser("sharding", __doc__, "a tiny network: half a minute", "of all ways; without it 5").parse_args()
    about = print_machine(("torch",))
    rounds, steps = (1, 3) if args.quick else (args.rounds or 5, 10)
    recipe = Squares(32, 4, 4) if args.quick else Squares(384, 8, 64)
    tables = [table(world, run(world, recipe, rounds, steps)) for world in (2, 3, 4)]
    report(tables, [], about, args.json)


if __name__ == "__main__":
    command(main)
