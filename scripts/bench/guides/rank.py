"""Serves turns on one rank, each a way to train."""

from pathlib import Path
from typing import Any

import hydra.core.hydra_config
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from scripts.bench import tune
from scripts.bench.comm import rank
from scripts.bench.comm.rank import Synthetic, build, join
from scripts.bench.guides.ways import WAYS, Way, config_of
from scripts.bench.hetero import Limit
from scripts.bench.hosts import Ask, Clock, Order, Timed, fit, place_of, serve
from trainer.process.environment import Place
from trainer.session import build_components
from trainer.trainer import Trainer

SIZE, MICRO, ACCUMULATE = "10M", 5, 4
assert hydra.core.hydra_config and tune  # imported once, for all turns


def echelon(way: Way, recipe: Synthetic, place: Place, clock: Clock) -> None:
    folder = Path(place.store).parent
    folders = (f"trainer.run_dir={folder}/run", f"trainer.checkpoint.dir={folder}/ckpt")
    parts = build_components(config_of((*way.words, *folders)))
    if way.cores:
        hold(parts["recipe"], way.cores[place.rank])
    fit(Trainer(**{**parts, "callbacks": {**parts["callbacks"], "timed": Timed(clock)}}, place=place))


def hold(recipe: Any, cores: float) -> None:
    """Let the rank sleep before each loss, as if it had so much of a core."""
    limit, loss = Limit(), recipe.loss
    limit.hold(cores)

    def held(model: Any, batch: Any) -> Tensor:
        limit.sleep()
        return loss(model, batch)

    recipe.loss = held


def each_reduced(way: Way, recipe: Synthetic, place: Place, clock: Clock) -> None:
    """Train with DDP, which reduces the gradients after each of the micro-batches of a step."""
    join(place)
    module, optimizer = build(recipe)
    model = DistributedDataParallel(module)
    micros = [
        {key: value[first : first + MICRO] for key, value in batch.items()}
        for batch in recipe.data("train") or []
        for first in range(0, recipe.batch, MICRO)
    ]
    for step in clock:
        for part in range(ACCUMULATE):
            micro = micros[(step * ACCUMULATE + part) % len(micros)]
            (recipe.loss(model, micro) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


RUNS: dict[str, Any] = {"alone": rank.alone, "echelon": echelon, "each_reduced": each_reduced}


def turn(order: Order, ask: Ask) -> None:
    way, place = WAYS[order["row"]], place_of(order)
    RUNS[way.run](way, Synthetic(SIZE, place.rank), place, Clock(ask, order["steps"], way.warm, way.every))


if __name__ == "__main__":
    serve(turn)
