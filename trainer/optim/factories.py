"""Makes the optimizers that the config names, torch's own and others."""

from typing import Annotated

import torch
from torch.optim import Optimizer

from trainer.annotated import AtLeast, AtMost, Beta, NonNegativeFloat, PositiveFloat, PositiveInt, check_arguments
from trainer.errors import ConfigError
from trainer.optim.groups import Groups, refuse_rows
from trainer.optim.lamb import Lamb
from trainer.optim.lars import Lars


def of_recipe(params: Groups) -> Optimizer:
    """Mark the recipe's own optimizer in a config. It is never called."""
    raise ConfigError("optimizer=recipe: is for a config; in Python give Trainer(optimizer=recipe.optimizer)")


@check_arguments("optimizer.")
def adamw(
    params: Groups,
    lr: PositiveFloat = 1e-3,
    betas: tuple[Beta, Beta] = (0.9, 0.98),
    eps: NonNegativeFloat = 1e-6,
    weight_decay: NonNegativeFloat = 0.01,
) -> Optimizer:
    """Make AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused where possible.

    The default betas and eps are RoBERTa's (Liu et al. 2019, arXiv:1907.11692).
    """
    groups = list(params)
    weights = (p for group in groups for p in (group["params"] if isinstance(group, dict) else [group]))
    fused = not any(map(torch.is_complex, weights))  # torch has no fused AdamW for complex weights
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=fused)


@check_arguments("optimizer.")
def sgd(
    params: Groups,
    lr: PositiveFloat = 0.1,
    momentum: NonNegativeFloat = 0.9,
    nesterov: bool = False,
    weight_decay: NonNegativeFloat = 0.0,
) -> Optimizer:
    # Not fused: torch 2.13's fused SGD does not update bf16 parameters on the CPU (pytorch#191763). Also, if fp16's
    # scaler skips the first step, the momentum starts as uninitialised memory, on CUDA too. Without fusing, each step
    # in fp16 waits for the device.
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


@check_arguments("optimizer.")
def lamb(
    params: Groups,
    lr: PositiveFloat = 2e-3,
    betas: tuple[Beta, Beta] = (0.9, 0.999),
    eps: NonNegativeFloat = 1e-6,
    weight_decay: NonNegativeFloat = 0.01,
) -> Optimizer:
    return Lamb(params, lr, (betas[0], betas[1]), eps, weight_decay)


@check_arguments("optimizer.")
def lars(
    params: Groups,
    lr: PositiveFloat = 1.0,
    momentum: Beta = 0.9,
    weight_decay: NonNegativeFloat = 5e-4,
    trust_coefficient: PositiveFloat = 1e-3,
) -> Optimizer:
    return Lars(params, lr, momentum, weight_decay, trust_coefficient)


@check_arguments("optimizer.")
def adafactor(
    params: Groups,
    lr: PositiveFloat = 1e-2,
    beta2_decay: Annotated[float, AtMost(0)] = -0.8,
    eps: tuple[NonNegativeFloat | None, NonNegativeFloat] = (None, 1e-3),
    d: Annotated[float, AtLeast(1)] = 1.0,
    weight_decay: NonNegativeFloat = 0.0,
) -> Optimizer:
    """Make Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), without momentum.

    The second moment of an n x m matrix takes n + m elements. Each step waits for the device.

    Args:
        beta2_decay: Exponent c of the second moment's decay, 1 - t**c.
        eps: Epsilon of the second moment (null: the dtype's), and the smallest parameter norm for relative steps.
        d: Largest root mean square of an update.
    """
    made = torch.optim.Adafactor(params, lr, beta2_decay, (eps[0], eps[1]), d, weight_decay)
    refuse_rows(made, "adafactor", "its moments are sums over whole matrices")
    return made


@check_arguments("optimizer.")
def adagrad(
    params: Groups,
    lr: PositiveFloat = 1e-2,
    lr_decay: NonNegativeFloat = 0.0,
    eps: NonNegativeFloat = 1e-10,
    weight_decay: NonNegativeFloat = 0.0,
) -> Optimizer:
    """Make Adagrad (Duchi et al. 2011, JMLR 12). It accepts sparse gradients, and leaves unused rows unchanged.

    Step t has the rate `lr / (1 + (t - 1) * lr_decay)`. Weight decay is added to the gradient.
    """
    return torch.optim.Adagrad(params, lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)


@check_arguments("optimizer.")
def adamw8bit(
    params: Groups,
    lr: PositiveFloat = 1e-3,
    betas: tuple[Beta, Beta] = (0.9, 0.98),
    eps: NonNegativeFloat = 1e-6,
    weight_decay: NonNegativeFloat = 0.01,
    min_8bit_size: PositiveInt = 4096,
) -> Optimizer:
    """Make AdamW with 8-bit moments (Dettmers et al. 2021, arXiv:2110.02861), which needs the package bitsandbytes.

    Parameters with fewer than `min_8bit_size` elements keep float32 moments.
    """
    try:
        from trainer.optim.adamw8bit import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optimizer=adamw8bit: needs the package bitsandbytes ({error}); pip install 'bitsandbytes>=0.50,<0.51'"
        ) from None
    settings = {"lr": lr, "betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
    return AdamW8bit(params, **settings, min_8bit_size=min_8bit_size)
