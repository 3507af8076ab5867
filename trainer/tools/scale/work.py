"""The work of a recipe, counted without a device: parameters on the meta device, and `flops_per_sample`."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from trainer.blocks import find_blocks
from trainer.config.build import build
from trainer.config.check import ALLOWED
from trainer.errors import ConfigError
from trainer.tools.cost_model.workload import Workload
from trainer.tools.scale.machines import Cluster
from trainer.tools.scale.options import ScaleOptions

STATE_BYTES = 16.0  # a parameter: weight, gradient and AdamW's moments, in float32
OPTIMIZER_BYTES = 28.0  # a parameter that AdamW's step moves: it reads four numbers and writes three
BF16 = {"auto": "bf16", "bf16_params": "bf16"}  # what these precisions compute in


def workload(config: Mapping[str, Any], cluster: Cluster, options: ScaleOptions) -> Workload:
    """Return the work of the recipe's samples on a device of the cluster.

    Raises:
        ConfigError: The recipe has no `flops_per_sample`, or the device's peak is unknown.
    """
    allow = (*ALLOWED, *config["trainer"]["allow_targets"])
    recipe = build("recipe", config["recipe"], allow)
    precision: str = config["trainer"]["precision"]
    precision = BF16.get(precision, precision)
    if not cluster.tflops.get(precision):
        known = ", ".join(cluster.tflops) or "no precision"
        raise ConfigError(f"trainer.precision={precision}: the machine has a peak for {known}; give tflops=NUMBER")
    flops = options.flops or getattr(recipe, "flops_per_sample", 0)
    if not flops:
        raise ConfigError("recipe: has no flops_per_sample; define the number, or give flops=NUMBER")
    with torch.device("meta"):
        model = recipe.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    shapes = tuple(tuple(p.shape) for p in parameters)
    sizes = tuple(map(math.prod, shapes))
    seconds = flops / (cluster.tflops[precision] * 1e12 * options.mfu)
    optimizer_s = OPTIMIZER_BYTES * sum(sizes) / cluster.memory_bytes_per_s if cluster.memory_bytes_per_s else 0.0
    return Workload(
        sizes, seconds / 3, seconds * 2 / 3, 0.0, optimizer_s, 0.0, 0.0, options.activation_mib * 2**20,
        STATE_BYTES * sum(sizes), shapes, jitter=options.jitter, boundary_bytes=boundary(recipe, model, precision),
    )  # fmt: skip


def boundary(recipe: Any, model: torch.nn.Module, precision: str) -> float:
    """Return the bytes of a sample between two blocks: tokens of the width of a block's smallest side; 0: unknown."""
    tokens = getattr(recipe, "tokens_per_sample", 0)
    try:
        blocks = find_blocks(recipe, model, None, "blocks")
    except ConfigError:
        return 0.0
    widths = [min(p.shape) for p in blocks[0].parameters() if p.dim() == 2]
    return float(tokens * min(widths) * (4 if precision in ("fp32", "tf32") else 2)) if widths else 0.0
