"""Makes the optimizers that the config names: torch's own, fused if possible, and others."""

import torch
from torch.optim import Optimizer

from trainer.errors import ConfigError, require
from trainer.optim.groups import Groups, refuse_rows
from trainer.optim.lamb import Lamb
from trainer.optim.lars import Lars


def of_recipe(params: Groups) -> Optimizer:
    """Stand for the optimizer that the recipe makes."""
    raise ConfigError("optimizer=recipe: is for a config; in Python give Trainer(optimizer=recipe.optimizer)")


def adamw(
    params: Groups,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Make AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).

    The defaults of betas and eps are RoBERTa's (Liu et al. 2019, arXiv:1907.11692).
    """
    require_adam(lr, betas, eps, weight_decay)
    groups = list(params)
    fused = not any(torch.is_complex(p) for group in groups for p in group["params"])  # torch has no fused AdamW for it
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=fused)


def sgd(
    params: Groups, lr: float = 0.1, momentum: float = 0.9, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    # Not fused: torch 2.13's fused SGD does not update bf16 parameters on the CPU (pytorch#191763). Also, if fp16's
    # scaler skips the first step, the momentum starts as uninitialised memory, on CUDA too. Without fusing, each step
    # in fp16 waits for the device.
    for key, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
        require(f"optimizer.{key}", value, at_least=0)
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def lamb(
    params: Groups,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    require_adam(lr, betas, eps, weight_decay)
    return Lamb(params, lr, (betas[0], betas[1]), eps, weight_decay)


def lars(
    params: Groups,
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    trust_coefficient: float = 1e-3,
) -> Optimizer:
    for key, value in (("lr", lr), ("weight_decay", weight_decay)):
        require(f"optimizer.{key}", value, at_least=0)
    require("optimizer.momentum", momentum, at_least=0, below=1)
    require("optimizer.trust_coefficient", trust_coefficient, above=0)
    return Lars(params, lr, momentum, weight_decay, trust_coefficient)


def adafactor(
    params: Groups,
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Make Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), without momentum.

    A matrix of n by m has a second moment of n + m elements. Each step waits for the device.

    Args:
        beta2_decay: Exponent c of the moment's decay, 1 - t**c.
        eps: Of the second moment (null: that of the type), and the least length of a parameter for the relative step.
        d: Largest root mean square of an update.
    """
    require("optimizer.lr", lr, at_least=0)
    if not beta2_decay <= 0:
        raise ConfigError(f"optimizer.beta2_decay={beta2_decay}: must be at most 0")
    for i, value in enumerate(eps):
        require(f"optimizer.eps.{i}", value, at_least=0)
    require("optimizer.d", d, at_least=1)
    require("optimizer.weight_decay", weight_decay, at_least=0)
    made = torch.optim.Adafactor(params, lr, beta2_decay, (eps[0], eps[1]), d, weight_decay)
    refuse_rows(made, "adafactor", "its moments are sums over whole matrices")
    return made


def adagrad(
    params: Groups, lr: float = 1e-2, lr_decay: float = 0.0, eps: float = 1e-10, weight_decay: float = 0.0
) -> Optimizer:
    """Make Adagrad (Duchi et al. 2011, JMLR 12), which takes sparse gradients: rows that are not used stay.

    Args:
        lr_decay: The rate of step t is `lr / (1 + (t - 1) * lr_decay)`.
        weight_decay: Times the weights, is added to the gradient.
    """
    for key, value in (("lr", lr), ("lr_decay", lr_decay), ("eps", eps), ("weight_decay", weight_decay)):
        require(f"optimizer.{key}", value, at_least=0)
    return torch.optim.Adagrad(params, lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)


def adamw8bit(
    params: Groups,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    min_8bit_size: int = 4096,
) -> Optimizer:
    """Make AdamW with moments of 8 bits (Dettmers et al. 2021, arXiv:2110.02861).

    Args:
        min_8bit_size: Elements of the smallest parameter with 8-bit moments.

    Raises:
        ConfigError: The package bitsandbytes is missing, or a setting is out of range.
    """
    require_adam(lr, betas, eps, weight_decay)
    require("optimizer.min_8bit_size", min_8bit_size, at_least=1)
    try:
        from trainer.optim.adamw8bit import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optimizer=adamw8bit: needs the package bitsandbytes ({error}); pip install 'bitsandbytes>=0.50,<0.51'"
        ) from None
    settings = {"lr": lr, "betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
    return AdamW8bit(params, **settings, min_8bit_size=min_8bit_size)


def require_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuse settings of an Adam that are out of range."""
    for key, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        require(f"optimizer.{key}", value, at_least=0)
    for i, beta in enumerate(betas):
        require(f"optimizer.betas.{i}", beta, at_least=0, below=1)
