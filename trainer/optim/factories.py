"""Makes the optimizers that the config names: torch's own, fused if possible, and LAMB."""

import torch
from torch.optim import Optimizer

from trainer.optim.groups import Groups
from trainer.optim.lamb import Lamb


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
    return torch.optim.AdamW(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=True)


def sgd(
    params: Groups, lr: float = 0.1, momentum: float = 0.9, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    # Not fused: torch 2.13's fused SGD does not update bf16 parameters on the CPU (pytorch#191763). Also, if fp16's
    # scaler skips the first step, the momentum starts as uninitialised memory, on CUDA too. Without fusing, each step
    # in fp16 waits for the device.
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def lamb(
    params: Groups,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    return Lamb(params, lr, (betas[0], betas[1]), eps, weight_decay)
