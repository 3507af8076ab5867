"""Serves turns on one rank, each a row: the ways to train."""

from collections.abc import Callable
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
from scripts.bench.hosts import TIMEOUT_S, Ask, Clock, Order, Timed, fit, place_of, serve
from trainer.config.options import CheckpointOptions, DDPOptions, Options
from trainer.optim.factories import adamw
from trainer.optim.groups import parameter_groups
from trainer.process.environment import Place
from trainer.trainer import Trainer

VOCABULARY, SEQUENCE, BATCHES = 8192, 32, 8


class Size(NamedTuple):
    hidden: int
    layers: int
    heads: int
    batch: int  # samples of a rank

    def bert(self) -> Bert:
        return Bert(vocab=VOCABULARY, sequence=SEQUENCE, hidden=self.hidden, layers=self.layers, heads=self.heads)


SIZES = {"10M": Size(320, 6, 5, 10), "30M": Size(512, 8, 8, 5)}  # by about how many parameters


def columns(masked: int) -> dict[str, tuple[int, int]]:
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


def alone(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
    module, optimizer = build(recipe)
    train(module, optimizer, recipe, clock)


def wire(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
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


def echelon(row: Row, recipe: Synthetic, place: Place, clock: Clock) -> None:
    folder = Path(place.store).parent
    options = options_in(folder, row, max_steps=10**6)  # `Timed` ends the turn before
    callbacks = {**row.build(), "timed": Timed(clock)}
    fit(Trainer(recipe, callbacks, adamw, batch=recipe.batch * place.world, options=options, place=place))


def options_in(folder: Path, row: Row, **more: Any) -> Options:
    return Options(
        accelerator="cpu", run_dir=str(folder / "run"), timeout_s=TIMEOUT_S, ddp=DDPOptions(row.bucket_mib),
        checkpoint=CheckpointOptions(str(folder / "ckpt"), every_steps=None, every_minutes=None), **more,
    )  # fmt: skip


RUNS: dict[str, Callable[[Row, Any, Place, Clock], None]] = {
    run.__name__: run for run in (alone, wire, ddp, averaged, echelon)
}


def turn(order: Order, ask: Ask) -> None:
    row, place = ROWS[order["row"]], place_of(order)
    clock = Clock(ask, order["steps"], row.warm, row.every)
    RUNS[row.run](row, Synthetic(order["model"], place.rank), place, clock)


if __name__ == "__main__":
    serve(turn)
