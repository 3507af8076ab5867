"""LAMB: Adam with a layer-wise trust ratio (You et al. 2020, arXiv:1904.00962)."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.optim.groups import Groups


class Lamb(Optimizer):
    """Adam whose update of each parameter is scaled to the parameter's norm (You et al. 2020, algorithm 2).

    The trust ratio |w| / |r + weight_decay * w| is 1 where either norm is zero. Memory: two copies of the parameters.
    """

    def __init__(self, params: Groups, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] no closures here
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for dtype in dict.fromkeys(p.dtype for p in params):  # else norms would get the widest dtype
                same = [p for p in params if p.dtype == dtype]
                self._step_group(group, same, [p.grad for p in same])

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
        steps = [self.state[p]["step"] for p in params]  # per parameter, because a bucket may be stepped alone
        roots = torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2**t for t in steps]))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(means, [1 - beta1**t for t in steps]), roots)
        if decay:
            torch._foreach_add_(updates, params, alpha=decay)
        weights, lengths = norms(params), norms(list(updates))
        ratios = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
        torch._foreach_mul_(updates, (ratios * lr).unbind())
        torch._foreach_sub_(params, updates)


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norms of n tensors as (n,), each with the same bits whatever the other tensors are."""
    return torch.stack(torch._foreach_norm(tensors))
