"""Runs a checkpoint's model over data, on several ranks: the common part of `evaluate` and `predict`."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer.comm.device import count_gpus
from trainer.comm.ranks import Ranks
from trainer.data.opening import in_turns, prepare_files
from trainer.errors import ConfigError, require
from trainer.inference.inference import Inference
from trainer.inference.predictions import Predictions
from trainer.launch.function import launch
from trainer.log import log_to_terminal
from trainer.precision import Precision
from trainer.process.arguments import ArgumentParser
from trainer.process.environment import detect
from trainer.process.temporary import sockets_in, temporary_folder
from trainer.run_dir import find_checkpoint
from trainer.tools.export import open_run, refuse_unread, whole_model

FLAGS = {"trainer.devices": "--devices", "micro_batch": "--micro-batch"}  # what takes a setting's place
# The trainer's options that are read.
READ = ("accelerator", "backend", "timeout_s", "precision", "deterministic", "master_weights", "seed", "allow_targets")


@dataclass(frozen=True)
class Request:
    """A request to read the data of `split` with the model of `checkpoint`."""

    checkpoint: str
    changes: list[str]  # KEY=VALUE, of the run's config
    split: str
    micro_batch: int | None  # None: as in the run

    @property
    def key(self) -> str:
        return f"CHECKPOINT={self.checkpoint}"


def parser(name: str, description: str) -> ArgumentParser:
    made = ArgumentParser(prog=f"echelon {name}", description=description)
    made.add_argument("checkpoint", help="runs/NAME, ckpt/last.pt, a run's folder of checkpoints, or a folder step-*")
    made.add_argument("--split", default="val", help="which data: the argument of recipe.data (default: val)")
    made.add_argument("--devices", default="auto", help="ranks; auto: one for each GPU, or one (default)")
    made.add_argument("--micro-batch", type=int, help="samples of a forward pass on a rank (default: the run's)")
    made.add_argument(
        "changes", nargs="*", default=[], metavar="KEY=VALUE", help="replaces a value of the run's config"
    )
    return made


def on_ranks(arguments: argparse.Namespace, function: Callable[[Request], Any]) -> Any:
    """Call `function` on a launcher's ranks, or start `--devices` ranks. Return rank 0's result, else None."""
    refuse_unread(arguments.changes, READ, FLAGS)
    require("--micro-batch", arguments.micro_batch, at_least=1)
    if not (arguments.devices == "auto" or arguments.devices.isdecimal()):
        raise ConfigError(f"--devices={arguments.devices}: is neither a number nor auto")
    devices = count_gpus("auto") or 1 if arguments.devices == "auto" else int(arguments.devices)
    request = Request(arguments.checkpoint, arguments.changes, arguments.split, arguments.micro_batch)
    place = detect(os.environ)
    if not place.launcher and devices != 1:
        return launch(function, request, devices=devices)
    with temporary_folder() as folder, sockets_in(folder):
        result = function(request)
    return None if place.rank else result


def evaluate(request: Request) -> dict[str, float]:
    """Return the metrics of the request's data. A collective."""
    with opened(request) as (reads, model):
        return reads.evaluate(model, request.split)


def predict(request: Request) -> Predictions:
    """Return the predictions for the request's data. A collective."""
    with opened(request) as (reads, model):
        return reads.predict(model, request.split)


@contextmanager
def opened(request: Request) -> Iterator[tuple[Inference, nn.Module]]:
    """Yield the data's reader and the whole model on this rank's device, once the ranks are connected."""
    path = find_checkpoint(request.checkpoint, request.key)
    manifest, made = open_run(path, request.changes, request.key)
    options = made["options"]
    ranks = Ranks(detect(os.environ), options.accelerator, options.backend, options.timeout_s)
    log_to_terminal(ranks.rank)
    try:
        precision = Precision(
            options.precision, ranks.device, options.deterministic, ranks.each, options.master_weights
        )
        in_turns(
            ranks.place, ranks.each, lambda: prepare_files(made["recipe"], options.seed, ranks.place.local_rank == 0)
        )
        model = precision.convert(whole_model(path, manifest, made, request.key).to(ranks.device))
        yield Inference(
            made["recipe"], ranks, precision, made["data"],
            micro=request.micro_batch or manifest.get("settings", {}).get("micro_batch") or 1,
            asked=request.micro_batch is not None, seed=options.seed, data_rank=ranks.rank, data_world=ranks.world,
        ), model  # fmt: skip
        ranks.leave()
    finally:
        ranks.close()
