"""Implements `Trainer.evaluate` and `Trainer.predict`: before `fit` with its first weights, later with its last."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainer.callback import overrides
from trainer.checkpoint import locate
from trainer.checkpoint.parts import open_parts
from trainer.checkpoint.pretrained import load_weights
from trainer.checkpointing import folder_of
from trainer.comm.ranks import Ranks
from trainer.context import Context
from trainer.errors import ConfigError
from trainer.inference.inference import Inference
from trainer.inference.predictions import Predictions


def evaluate(trainer: Context, split: str) -> dict[str, float]:
    """Return the metrics of the trainer's model over `recipe.data(split)`. A collective."""
    with inference(trainer, "evaluate") as reads:
        return reads.evaluate(trainer.eval_model, split)


def predict(trainer: Context, split: str) -> Predictions:
    """Return the predictions of the trainer's model for `recipe.data(split)`. A collective."""
    if not trainer.strategy.whole:
        raise ConfigError(f"predict: each rank has a part of the model; {alternative(trainer, 'predict')}")
    with inference(trainer, "predict") as reads:
        return reads.predict(trainer.eval_model, split)


@contextmanager
def inference(trainer: Context, what: str) -> Iterator[Inference]:
    """Yield an `Inference` with the trainer's model. Ranks whose run has ended reconnect for its duration."""
    several, strategy = trainer.world > 1, trainer.strategy
    if several and trainer.fitted and not (trainer.closed and strategy.whole):
        fix = alternative(trainer, what)
        if trainer.closed:
            raise ConfigError(f"{what}: each rank has a part of the model; {fix}")
        raise ConfigError(f"{what}: the run is still training, or has failed; call it after fit, or {fix}")
    if not trainer.fitted:
        load_first_weights(trainer)
    options, reconnects = trainer.options, several and trainer.closed
    ranks = trainer.ranks
    if reconnects:
        ranks = Ranks(trainer.ranks.place, options.accelerator, options.backend, options.timeout_s)
    try:
        yield Inference(
            trainer.recipe, ranks, trainer.precision, trainer.plan.data, micro=trainer.plan.micro, seed=options.seed,
            replicas=dist.group.WORLD if reconnects else strategy.replicas,
            lockstep=strategy.lockstep and not reconnects, data_rank=strategy.data_rank,
            data_world=strategy.data_world, beat=(lambda: None) if trainer.closed else trainer.heartbeat.beat,
        )  # fmt: skip
        if reconnects:
            ranks.leave()
    finally:
        if reconnects:
            ranks.close()


def alternative(trainer: Context, what: str) -> str:
    """Return a command if the run has a config and a checkpoint, else the Trainer to make instead."""
    saved = folder_of(trainer)
    resume = f", with Options(resume='{saved}')" if locate.checkpoints(saved) else ""
    if resume and (trainer.run_dir / "config.yaml").exists():
        return f"use echelon {what} {trainer.run_dir}"
    splits = [name for name, callback in trainer.callbacks.items() if overrides(callback, "distribute")]
    return f"make another Trainer{''.join(f' without {name}' for name in splits)}{resume}"


def load_first_weights(trainer: Context) -> None:
    """Load the weights with which `fit` would start."""
    resumed, manifest = trainer.plan.resumed, trainer.plan.manifest
    if resumed:
        sections = open_parts(resumed, manifest["files"], manifest["world"])
        trainer.strategy.load(trainer.optimizer, {"model": sections["model"]})
    elif trainer.options.init_from:
        load_weights(trainer.module, trainer.options.init_from)
