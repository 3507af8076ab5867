"""Serves turns on one rank: reads orders as lines of JSON, one a turn, and runs each in a child process of its own.

A turn pauses four times for an answer: set up, settled, done, settled again. Bytes sent between the two settled states
are counted. When the link changes no packet is on its way, since the kernel drops packets that wait for a link.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from recipes.bert import Bert
from scripts.bench.comm.rows import ROWS, Row
from trainer.callback import Callback, Role
from trainer.config.options import CheckpointOptions, DDPOptions, Options
from trainer.context import Context
from trainer.optim.factories import adamw
from trainer.optim.groups import parameter_groups
from trainer.process.environment import Place
from trainer.process.exit import die_with_parent
from trainer.trainer import Trainer

VOCABULARY, SEQUENCE, BATCHES = 8192, 32, 8
SET_UP = 4  # steps before the link gets slow: DDP lays out its buckets, PowerSGD begins after two
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
TIMEOUT_S = 120.0
Ask = Callable[[dict[str, Any]], None]


class Size(NamedTuple):
    hidden: int
    layers: int
    heads: int
    batch: int  # samples of a rank

    def bert(self) -> Bert:
        return Bert(vocab=VOCABULARY, sequence=SEQUENCE, hidden=self.hidden, layers=self.layers, heads=self.heads)


SIZES = {"10M": Size(320, 6, 5, 10), "30M": Size(512, 8, 8, 5)}  # by about how many parameters


def columns(masked: int) -> dict[str, tuple[int, int]]:
    """Return the bound of the random numbers of each input, and how many a sample has."""
    return {"input_ids": (VOCABULARY, SEQUENCE), "positions": (SEQUENCE, masked), "labels": (VOCABULARY, masked)}


class Synthetic:
    """BERT of about 10 or 30 million parameters, on batches of random tokens in memory.

    A step computes for about 0.25 or 0.37 s on one core.
    """

    def __init__(self, size: str, rank: int = 0) -> None:
        bert, self.batch = SIZES[size].bert(), SIZES[size].batch
        self.model, self.loss, self.weight = bert.model, bert.loss, bert.weight
        self.masked, self.rank = bert.masked, rank

    def data(self, split: str) -> list[dict[str, Tensor]] | None:
        if split != "train":
            return None
        random = torch.Generator().manual_seed(100 + self.rank)

        def draw(high: int, width: int) -> Tensor:
            return torch.randint(high, (self.batch, width), generator=random)

        return [{name: draw(*column) for name, column in columns(self.masked).items()} for _ in range(BATCHES)]


@dataclass
class Clock:
    """The steps of a turn, by number. `ask` sends a message to the bench and waits for the answer."""

    ask: Ask
    row: Row
    steps: int

    def __iter__(self) -> Iterator[int]:
        warm, every = self.row.warm, self.row.every
        yield from range(SET_UP)
        self.ask({"set up": True})
        sent = settled()
        self.ask({"settled": True})
        yield from range(SET_UP, warm)
        began, worked, busy = time.perf_counter(), time.process_time(), machine_s()
        yield from range(warm, warm + self.steps)
        took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - worked, "busy": machine_s() - busy}
        self.ask({key: value / self.steps for key, value in took.items()})
        meetings = (warm + self.steps) // every - SET_UP // every
        self.ask({"sent": (settled() - sent) / (meetings * every)})


def machine_s() -> float:
    """Read the CPU seconds of all processes since the machine's start: user, nice and system."""
    return sum(map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])) / os.sysconf("SC_CLK_TCK")


def settled() -> int:
    """Wait until no packet is on its way, and read the bytes sent."""
    sent, before = int(SENT.read_text()), -1
    while sent != before:
        time.sleep(0.2)
        before, sent = sent, int(SENT.read_text())
    return sent


def alone(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
    """Train without peers."""
    module, optimizer = build(recipe)
    train(module, optimizer, recipe, clock)


def wire(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
    """Run the all-reduces of a step, back to back, and nothing else."""
    join(place)
    size = sum(p.numel() for p in recipe.model().parameters())
    parts = torch.zeros(size).split(25 << 18)  # 25 MiB, as DDP has them
    for _ in clock:
        for part in parts:
            dist.all_reduce(part)


def ddp(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
    join(place)
    module, optimizer = build(recipe)
    model = DistributedDataParallel(module, bucket_cap_mb=row.bucket_mib)
    if row.hook == "powersgd":
        rank_1 = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=2)
        model.register_comm_hook(rank_1, powerSGD_hook)
    elif row.hook:
        cast, world = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[row.hook], dist.group.WORLD
        assert world is not None

        def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return cast(world, bucket)  # DDP refuses torch's bf16 hook, by its name, on a CPU

        model.register_comm_hook(None, hook)
    train(model, optimizer, recipe, clock)


def averaged(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
    """Train with torch's own local SGD, which averages the weights every `row.every` steps."""
    join(place)
    module, optimizer = build(recipe)
    averager = PeriodicModelAverager(period=row.every, warmup_steps=row.every - 1)
    train(module, PostLocalSGDOptimizer(optimizer, averager), recipe, clock)


def join(place: Place) -> None:
    store = dist.FileStore(place.store, place.world)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world)


def build(recipe: Synthetic) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    module = recipe.model().train()
    return module, adamw(parameter_groups(module))


def train(model: nn.Module, optimizer: Optimizer, recipe: Synthetic, clock: Clock) -> None:
    batches = recipe.data("train") or []
    for step in clock:
        recipe.loss(model, batches[step % BATCHES]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Over(Exception):
    """The end of a turn's steps. Validation and the last checkpoint are skipped."""


class Timed(Callback):
    """Counts the steps of a turn."""

    role = Role.MEASURE  # after the callbacks that train

    def __init__(self, clock: Clock) -> None:
        self.steps = iter(clock)

    def on_fit_start(self, trainer: Context) -> None:
        next(self.steps)

    def on_step_end(self, trainer: Context) -> None:
        if next(self.steps, None) is None:
            trainer.emit("on_flush")  # deferred all-reduces need their peers
            raise Over


def echelon(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
    folder = Path(place.store).parent
    options = Options(
        max_steps=10**6,  # `Timed` ends the turn before
        accelerator="cpu",
        run_dir=str(folder / "run"),
        timeout_s=TIMEOUT_S,
        checkpoint=CheckpointOptions(str(folder / "ckpt"), every_steps=None, every_minutes=None),
        ddp=DDPOptions(row.bucket_mib),
    )
    callbacks = {**row.build(), "timed": Timed(clock)}
    trainer = Trainer(recipe, callbacks, adamw, batch=recipe.batch * place.world, options=options, place=place)
    try:
        trainer.fit()
    except Over:
        trainer.close()


RUNS: dict[str, Callable[[Row, Any, Place, Clock], None]] = {
    run.__name__: run for run in (alone, wire, ddp, averaged, echelon)
}


def turn(order: dict[str, Any], ask: Ask) -> None:
    row = ROWS[order["row"]]
    torch.set_num_threads(1)
    place = Place(order["rank"], order["world"], 0, 1, order["store"], "benchmark")
    RUNS[row.run](row, Synthetic(order["model"], place.rank), place, Clock(ask, row, order["steps"]))


def serve(turn: Callable[[dict[str, Any], Ask], None]) -> None:
    """Run `turn` in a child process for each order on standard input."""
    importlib.import_module("transformers.models.bert.modeling_bert")  # once, for all children
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that the output of libraries does not mix with answers

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def ask(question: dict[str, Any]) -> None:
        tell(question)
        sys.stdin.readline()

    tell({"started": True})
    for line in iter(sys.stdin.readline, ""):
        server = os.getpid()
        child = os.fork()
        if not child:
            die_with_parent(server)
            try:
                turn(json.loads(line), ask)
            except BaseException as error:
                traceback.print_exc()
                tell({"error": f"{type(error).__name__}: {error}".splitlines()[0][:100]})
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        tell({"error": f"ended with code {code}"} if code else {"ended": True})


if __name__ == "__main__":
    serve(turn)
