"""Computes the matrix products of linear layers in FP8, using torchao."""

import importlib.util
import logging
from collections import Counter
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.log import log
from trainer.optim.groups import hidden_matrices

KEY = "trainer.precision=fp8"
FIRST = (8, 9)  # compute capability of the first GPUs with FP8: Ada and Hopper
TILE = 16  # elements: the sizes of FP8's matrix products are multiples of it
FIT = "fit"


def refuse_without_fp8(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST:
        raise ConfigError(
            f"{KEY}: {device} has no FP8, which needs a GPU of compute capability 8.9 or later; use "
            "trainer.precision=auto"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"{KEY}: needs the package torchao; python -m pip install 'torchao>=0.18,<0.19'")


def compute_in_fp8(model: nn.Module) -> nn.Module:
    """Let linear layers compute in FP8 (Micikevicius et al. 2022, arXiv:2209.05433), and return the model.

    Inputs and weights are cast to E4M3, and gradients of outputs to E5M2. Each tensor has one scale, from its current
    maximum. Names, float32 values and optimizer state of the parameters stay the same.

    Layers are not converted if their sizes are no multiples of 16. Neither are output heads and weights tied to
    embeddings, which need more bits, nor layers with a subclass or hooks, whose code would be lost.
    """
    convert, config = load_torchao()
    matrices = hidden_matrices(model)
    kinds: dict[nn.Module, str] = {
        layer: kind(layer, matrices) for layer in model.modules() if isinstance(layer, nn.Linear)
    }
    counts = Counter(kinds.values())
    others = ", ".join(f"{count} {why}" for why, count in counts.items() if why != FIT) or "none"
    if not counts[FIT]:
        raise ConfigError(f"{KEY}: no linear layer can compute in FP8 ({others}); use trainer.precision=bf16")
    log.info("precision: %d of %d linear layers compute in fp8; others: %s", counts[FIT], len(kinds), others)
    return convert(model, module_filter_fn=lambda layer, name: kinds[layer] == FIT, config=config)


def kind(layer: nn.Linear, matrices: set[Any]) -> str:
    """Return `FIT`, or why the layer is not converted."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if type(layer) is not nn.Linear or any(hooks):
        return "with code of their own"
    if layer.weight not in matrices:
        return "at the output or tied to an embedding"
    return "with sizes that are no multiples of 16" if layer.in_features % TILE or layer.out_features % TILE else FIT


def load_torchao() -> tuple[Any, Any]:
    """Return torchao's conversion, and a configuration that pads token counts to multiples of 16.

    Its import warns about libraries for other versions of Python or torch, which FP8 does not need.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    finally:
        logging.disable(disabled)
    return convert_to_float8_training, Float8LinearConfig(pad_inner_dim=True)
