"""Counts what a rank holds under each stage of `shard`, and times its steps and DDP's.

    python -m scripts.bench.sharding [--quick] [--rounds 5] [--json FILE]

Bytes are those of the fullest rank, with each stage of `shard`, with `optimizer_in_backward` and with `auto_batch`.
Gradients are counted after the backward pass, without DDP's buckets. AdamW trains a network of
square layers in float32. The ranks are processes of this machine. With fewer cores than ranks, times tell what a
callback adds to a step, and nothing about a network. In each round every way has a run, in an order that turns. A ratio
is the median over rounds of the ratio to DDP in the same round. It took 13 minutes on 2 busy CPU cores.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from scripts.bench.harness import Report, Rounds, Row, Turn, on_ranks, parser
from scripts.bench.squares import Squares, quiet
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.auto_batch import AutoBatch
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.shard.callback import Shard
from trainer.comm.slices import local
from trainer.data.batch import Step
from trainer.parallel.forward_backward import ForwardBackward
from trainer.process.environment import Place

KIB = 2**10
KINDS = ("parameters", "gradients", "optimizer state")
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


def train(place: Place, recipe: Squares, way: str, number: int, steps: int) -> Turn:
    made, counts = WAYS[way](), Counts()
    callbacks: dict[str, Callback] = {"counts": counts, **({"own": made} if made else {})}
    own = replace(place, store=f"{place.store}-{number}")
    quiet(recipe, callbacks, own, f"runs/{number}", 4 * place.world, steps + WARM).fit()
    ends = counts.ends[WARM - 1 :]
    return {**counts.bytes, "seconds": statistics.median(b - a for a, b in itertools.pairwise(ends))}


def rounds_of(place: Place, recipe: Squares, rounds: int, steps: int) -> Rounds:
    numbers = itertools.count()
    return Rounds.of(WAYS).run(rounds, lambda way: train(place, recipe, way, next(numbers), steps))


def table(world: int, ranks: list[Rounds]) -> list[Row]:
    """Make a row for each way, with the bytes of the rank that has the most."""

    def held(way: str) -> list[float]:
        return max(([rank.turns[way][0][kind] for kind in KINDS] for rank in ranks), key=sum)

    return ranks[0].table(f"{world} ranks", "callback", {
        **{f"{kind}, KiB": lambda way, i=i: held(way)[i] / KIB for i, kind in enumerate(KINDS)},
        "sum, of DDP": lambda way: sum(held(way)) / sum(held("DDP")),
        "step, of DDP": lambda way: ranks[0].ratio(way, "DDP"),
    })  # fmt: skip


def main() -> None:
    args = parser("sharding", __doc__, "a tiny network: half a minute", "of all ways; without it 5").parse_args()
    rounds, steps = (1, 3) if args.quick else (args.rounds or 5, 10)
    recipe = Squares(32, 4, 4) if args.quick else Squares(384, 8, 64)
    with Report(args.json) as report:
        for world in (2, 3, 4):
            report.add(table(world, on_ranks(world, rounds_of, recipe, rounds, steps)))


if __name__ == "__main__":
    command(main)
