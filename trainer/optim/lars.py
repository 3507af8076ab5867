"""LARS: SGD with a layer-wise learning rate (You et al. 2017, arXiv:1708.03888)."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.optim.groups import Groups
from trainer.optim.lamb import norms


class Lars(Optimizer):
    """SGD with momentum whose rate for each matrix depends on the matrix's norm (You et al. 2017, algorithm 1).

    The local rate is `trust_coefficient * |w| / (|gradient| + weight_decay * |w|)`. It is 1 where either norm is zero,
    and for parameters with fewer than two dimensions, which often start at zero. As in the paper, the momentum includes
    past rates, whereas torch's SGD applies the current rate to all of it. Memory: one copy of the parameters.
    """

    def __init__(
        self, params: Groups, lr: float, momentum: float, weight_decay: float, trust_coefficient: float
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        super().__init__(params, own)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] no closures here
        for group in self.param_groups:
            lr, decay = group["lr"], group["weight_decay"]
            params = [p for p in group["params"] if p.grad is not None]
            kinds = [(p.dim() > 1, p.dtype) for p in params]
            for matrices, dtype in dict.fromkeys(kinds):  # else norms would get the widest dtype
                some = [p for p, kind in zip(params, kinds, strict=True) if kind == (matrices, dtype)]
                gradients = [p.grad for p in some]
                updates = torch._foreach_add(gradients, some, alpha=decay)
                if matrices:
                    weights = norms(some)
                    lengths = norms(gradients)
                    local = group["trust_coefficient"] * weights / (lengths + decay * weights)
                    local = torch.where((weights > 0) & (lengths > 0), local, 1.0)
                    torch._foreach_mul_(updates, (local * lr).unbind())
                else:
                    torch._foreach_mul_(updates, lr)
                momenta = [self._momentum(p) for p in some]
                torch._foreach_mul_(momenta, group["momentum"])
                torch._foreach_add_(momenta, updates)
                torch._foreach_sub_(some, momenta)

    def _momentum(self, p: Tensor) -> Tensor:
        if not self.state[p]:
            self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        return self.state[p]["momentum_buffer"]
