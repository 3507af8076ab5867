"""Muon for hidden matrices and AdamW for everything else, as one optimizer."""

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.annotated import Below, Beta, NonNegativeFloat, PositiveFloat, PositiveInt, check_arguments
from trainer.comm.slices import cut_like, is_sharded, local
from trainer.errors import ConfigError
from trainer.optim.factories import adamw
from trainer.optim.groups import Groups

# Settings of the other part, by whether a group is hidden.
OTHERS = {True: ("betas",), False: ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")}


class Muon(Optimizer):
    """torch's Muon for hidden matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon), AdamW for the rest.

    Muon's update is the momentum with all singular values near 1, from `ns_steps` Newton-Schulz iterations in bf16.
    With `match_rms_adamw` it has the root mean square of AdamW's update, so both use the same rate (Liu et al. 2025,
    arXiv:2502.16982). Memory: one copy of the hidden matrices, two of the rest.

    Hidden matrices are those of `hidden_matrices`, unless a group sets `hidden`. If a matrix is sharded, its gradient
    and momentum are gathered for the step.

    Args:
        adamw_lr: Rate of the AdamW part; null: `lr`.
        betas, eps: Of the AdamW part. A group's own `eps` applies to whichever part steps the group.
    """

    by_hidden: ClassVar[bool] = True  # `make_optimizer` gives each group `hidden`

    @check_arguments("optimizer.")
    def __init__(
        self,
        params: Groups,
        lr: PositiveFloat = 1e-3,
        weight_decay: NonNegativeFloat = 0.01,
        momentum: Beta = 0.95,
        nesterov: bool = True,
        ns_steps: Annotated[PositiveInt, Below(100)] = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adamw_lr: NonNegativeFloat | None = None,
        betas: tuple[Beta, Beta] = (0.9, 0.98),
        eps: NonNegativeFloat = 1e-6,
    ) -> None:
        groups = list(params)
        if not all("hidden" in group for group in groups):
            raise ConfigError(
                "optimizer=muon: its groups don't say which matrices are hidden; give the Trainer functools.partial("
                "Muon, ...), or groups with hidden=true or false"
            )
        if not (hidden := [group for group in groups if group["hidden"]]):
            raise ConfigError(
                "optimizer=muon: the model has no hidden matrix; mark some by optimizer.groups, with hidden: true, or "
                "use optimizer=adamw"
            )
        refuse_others(hidden)
        refuse_without_effect(groups)
        own: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        own |= {"weight_decay": weight_decay, "adjust_lr_fn": adjust_lr_fn}
        self.parts: dict[bool, Optimizer] = {True: torch.optim.Muon(hidden, lr, **own)}
        if rest := [group for group in groups if not group["hidden"]]:
            self.parts[False] = adamw(rest, lr if adamw_lr is None else adamw_lr, betas, eps, weight_decay)
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})
        self.defaults = {"lr": lr, **own, "betas": betas, "eps": eps, "hidden": True}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] no closures here
        self._refuse_other_state()
        for hidden, part in self.parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["hidden"] == hidden]
            if hidden:
                self._step_slices(part)
            part.step()

    def _step_slices(self, part: Optimizer) -> None:
        """Step the sharded matrices, and leave the others to `part`. A collective.

        The ranks gather the gradient and the momentum of one matrix at a time, because the update needs whole matrices.
        Each rank keeps its slice of the result.
        """
        groups, part.param_groups = part.param_groups, []
        for group in groups:
            part.param_groups.append({**group, "params": [p for p in group["params"] if not is_sharded(p)]})
            for p in (p for p in group["params"] if is_sharded(p) and p.grad is not None):
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                whole = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=p.device))
                cut_like(whole, p).copy_(local(p))  # the update acts on single weights, so other ranks' may be 0
                whole.grad = p.grad.full_tensor()
                alone = torch.optim.Muon([{**group, "params": [whole]}])
                alone.state[whole] = {"momentum_buffer": momentum.full_tensor()}
                alone.step()
                local(p).copy_(cut_like(whole, p))
                local(momentum).copy_(cut_like(alone.state[whole]["momentum_buffer"], p))

    def _refuse_other_state(self) -> None:
        for group in self.param_groups:
            others = "exp_avg" if group["hidden"] else "momentum_buffer"
            if any(others in self.state.get(p, {}) for p in group["params"]):
                raise ConfigError(
                    "trainer.resume: other matrices were hidden in the checkpoint; set optimizer.groups back, or take "
                    "the weights alone: trainer.init_from"
                )


def refuse_others(hidden: list[dict[str, Any]]) -> None:
    """Refuse parameters that are no real matrices, and rows that can't be gathered."""
    for group in hidden:
        if any(is_sharded(p) and p.device.type != p.device_mesh.device_type for p in group["params"]):
            raise ConfigError(
                "optimizer=muon: gathers whole matrices on the device, and the rows are on the host; set "
                "callbacks.shard.offload=false, or use optimizer=adamw"
            )
        if any(p.is_complex() for p in group["params"]):
            raise ConfigError("optimizer=muon: takes real matrices, and one is complex; use optimizer=adamw")
        if shapes := [tuple(p.shape) for p in group["params"] if p.dim() != 2]:
            raise ConfigError(
                f"optimizer.groups: hidden=true matches a parameter of shape {shapes[0]}, and Muon takes two "
                "dimensions; match matrices only"
            )


def refuse_without_effect(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        for name in OTHERS[group["hidden"]]:
            if name in group:
                part, hidden = ("Muon", "false") if group["hidden"] else ("AdamW", "true")
                raise ConfigError(
                    f"optimizer.groups: {name}={group[name]} has no effect on parameters that are stepped by {part}; "
                    f"match others, or for matrices give hidden: {hidden}"
                )
