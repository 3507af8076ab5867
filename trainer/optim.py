"""Optimizers as the config names them: torch's own, fused where it has that, and LAMB."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import ConfigError

Groups = Iterable[dict[str, Any]]


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices, and what takes no weight decay: norms and biases, which is every parameter of fewer than
    two dimensions."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(optimizer: Callable[[Groups], Optimizer], module: nn.Module) -> Optimizer:
    """Raises:
    ConfigError: for settings that the optimizer refuses.
    """
    try:
        return optimizer(parameter_groups(module))
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}; mend optimizer.*") from error


def adamw(
    params: Groups,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Loshchilov and Hutter 2019, arXiv:1711.05101; betas and eps as in RoBERTa (Liu et al. 2019, arXiv:1907.11692)."""
    return torch.optim.AdamW(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=True)


def sgd(
    params: Groups, lr: float = 0.1, momentum: float = 0.9, nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    # Not fused: torch 2.13's fused SGD leaves bf16 parameters on the CPU as they are (pytorch#191763), and where fp16's
    # scaler skips the first step, momentum starts as whatever was in that memory.
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def lamb(
    params: Groups,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Optimizer:
    return Lamb(params, lr, (betas[0], betas[1]), eps, weight_decay)


class Lamb(Optimizer):
    """Adam whose step per parameter has the length of the parameter (You et al. 2020, arXiv:1904.00962, algorithm 2).

    The trust ratio |w| / |r + weight_decay * w| is 1 where either norm is zero. Memory: two copies of the parameters.
    """

    def __init__(self, params: Groups, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] no closures here
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params, [p.grad for p in params])

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Any]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.state[p]["step"] += 1
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        steps = [self.state[p]["step"] for p in params]  # of this parameter: a bucket may step on its own
        roots = torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(means, [1 - beta1**t for t in steps]), roots)
        if decay:
            torch._foreach_add_(updates, params, alpha=decay)
        for p, update in zip(params, updates, strict=True):
            weight_norm, update_norm = p.norm(), update.norm()
            ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
            p.sub_(update.mul_(ratio * lr))


class Stepped:
    """Stands for `optimizer`, with another `step`."""

    def __init__(self, optimizer: Optimizer, step: Callable[[], None]) -> None:
        self.optimizer, self.step = optimizer, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
