"""Counts the work of a recipe without a device: parameters on the meta device, and `flops_per_sample`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config.build import build
from trainer.config.check import LIBRARIES, split_groups
from trainer.cost.workload import Workload
from trainer.errors import ConfigError, printable
from trainer.optim.groups import ParameterRules, WithGroups, make_optimizer
from trainer.parallel.blocks import find_blocks
from trainer.parallel.memory_search import state_share
from trainer.session import build_or_own
from trainer.tools.scale.machines import Cluster
from trainer.tools.scale.options import ScaleOptions

NUMBER = 4.0  # bytes, in float32
ADAMW = 2.0  # numbers that AdamW keeps per parameter: its moments


@dataclass(frozen=True)
class Work:
    """The work of a recipe on a device, and its memory."""

    workload: Workload
    precision: str  # of matrix products
    frozen_bytes: float  # of parameters without gradient and state, which `workload` leaves out
    unknown: tuple[str, ...]  # a line for each thing that is not in the numbers


def count(config: Mapping[str, Any], cluster: Cluster, options: ScaleOptions) -> Work:
    recipe, model, new_optimizer = on_meta(config)
    precision = computed_in(config["trainer"]["precision"], cluster)
    flops = options.flops or getattr(recipe, "flops_per_sample", 0)
    if not flops:
        raise ConfigError("recipe: has no flops_per_sample; define the number, or give flops=NUMBER")
    parameters = [p for p in model.parameters() if p.requires_grad]
    shapes = tuple(tuple(p.shape) for p in parameters)
    sizes = tuple(map(math.prod, shapes))
    frozen = sum(p.numel() for p in model.parameters()) - sum(sizes)
    kept, unknown = kept_by(new_optimizer)
    rate = cluster.memory_bytes_per_s
    unknown += [] if rate else ["optimizer: its step takes 0 s, since the rate of the device's memory is unknown"]
    unknown += [f"memory: with {frozen:,} frozen parameters whole on each rank"] if frozen else []
    if config["trainer"]["precision"] == "bf16_params":
        unknown.append("memory: without the copies that bf16_params keeps of the parameters")
    moved = NUMBER * (3 + 2 * kept) * sum(sizes)  # the step reads the gradient, and reads and writes all else
    seconds = flops / (cluster.tflops[precision] * 1e12 * options.mfu)
    workload = Workload(
        sizes, seconds / 3, seconds * 2 / 3, 0.0, moved / rate if rate else 0.0, 0.0, 0.0,
        options.activation_mib * 2**20, NUMBER * (2 + kept) * sum(sizes), shapes, jitter=options.jitter,
        boundary_bytes=boundary(recipe, model, precision),
    )  # fmt: skip
    return Work(workload, precision, NUMBER * frozen, tuple(unknown))


def on_meta(config: Mapping[str, Any]) -> tuple[Any, nn.Module, Callable[[nn.Module], Optimizer]]:
    """Return the recipe, its model on the meta device with parameters frozen, and its optimizer's constructor.

    Raises:
        ConfigError: The recipe needs the values of tensors, which the meta device lacks.
    """
    allow = (*LIBRARIES, *config["trainer"]["allow_targets"])
    recipe = build("recipe", config["recipe"], allow)
    groups, optimizer = split_groups(config["optimizer"])
    try:
        with torch.device("meta"):
            model = recipe.model()
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
        reason = printable(str(error).splitlines()[0])
        raise ConfigError(
            f"recipe.model(): can't be built on the meta device, where tensors have no values: {reason}; load weights "
            "by trainer.init_from, and compute numbers without torch"
        ) from error
    made = WithGroups(build_or_own("optimizer", optimizer, allow, recipe), groups or ())
    ParameterRules(made, recipe, model)  # freezes what a group freezes
    return recipe, model, partial(make_optimizer, made)


def computed_in(precision: str, cluster: Cluster) -> str:
    found = {"auto": cluster.auto, "bf16_params": "bf16"}.get(precision, precision)
    if not cluster.tflops.get(found):
        known = ", ".join(cluster.tflops) or "no precision"
        way = "fp16" if "fp16" in cluster.tflops else next(iter(cluster.tflops), "")
        way = f"trainer.precision={way} or " if way else ""
        raise ConfigError(f"trainer.precision={precision}: the machine has a peak for {known}; give {way}tflops=NUMBER")
    return found


def kept_by(new_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[float, list[str]]:
    """Return the numbers that the optimizer keeps per parameter, and a line if they are unknown or differ."""
    try:
        most, least = (state_share(new_optimizer, torch.device("cpu"), choose) for choose in (max, min))
        differs = [f"optimizer: its state is counted at {most:.2g} numbers a parameter, and some have {least:.2g}"]
        return most, differs if least < most else []
    except Exception as error:  # of an optimizer that only steps its recipe's model
        reason = printable(f"{type(error).__name__}: {error}".splitlines()[0])
        return ADAMW, [f"optimizer: its state is unknown ({reason}); two numbers a parameter are taken, as of AdamW"]


def boundary(recipe: Any, model: nn.Module, precision: str) -> float:
    """Return a sample's bytes between two blocks: tokens times a block's smallest width; 0: unknown."""
    tokens = getattr(recipe, "tokens_per_sample", 0)
    try:
        blocks = find_blocks(recipe, model, None, "blocks")
    except ConfigError:
        return 0.0
    widths = [min(p.shape) for p in blocks[0].parameters() if p.dim() == 2]
    return float(tokens * min(widths) * (4 if precision in ("fp32", "tf32") else 2)) if widths else 0.0
