"""Muon for hidden matrices, and AdamW for all other parameters, as one optimizer."""

from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from trainer.errors import ConfigError, require, require_one_of
from trainer.optim.factories import adamw
from trainer.optim.groups import Groups

OTHERS = {True: ("betas",), False: ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")}  # by hidden: the other part's
RATES = ("match_rms_adamw", "original")


class Muon(Optimizer):
    """torch's Muon for hidden matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon), AdamW for the rest.

    Muon's update is the momentum with all singular values near 1, by `ns_steps` Newton-Schulz iterations in bf16. By
    `match_rms_adamw`, the update has the root mean square of AdamW's, so both take the same rate (Liu et al. 2025,
    arXiv:2502.16982). Memory: one copy of the hidden matrices, two of the rest.

    Hidden are the matrices of two dimensions that `trainer.optim.groups.hidden_matrices` finds. A group's setting
    `hidden` decides otherwise.

    Args:
        adamw_lr: Rate of AdamW's part; null: `lr`.
        betas, eps: Of AdamW's part. A group's `eps` is of the part that steps the group.

    Raises:
        ConfigError: A knob is out of range, or no matrix is hidden.
    """

    by_hidden: ClassVar[bool] = True  # `make_optimizer` gives each group `hidden`

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
    ) -> None:
        for key, value in (("lr", lr), ("weight_decay", weight_decay), ("adamw_lr", adamw_lr)):
            require(f"optimizer.{key}", value, at_least=0)
        require("optimizer.momentum", momentum, at_least=0, below=1)
        require("optimizer.ns_steps", ns_steps, at_least=1, below=100)
        require_one_of("optimizer.adjust_lr_fn", adjust_lr_fn, RATES)
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
        self.checked = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] no closures here
        if not self.checked:
            self._refuse_other_state()
        for hidden, part in self.parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["hidden"] == hidden]
            part.step()

    def _refuse_other_state(self) -> None:
        """Refuse the state of a checkpoint in which other matrices were hidden."""
        for group in self.param_groups:
            others = "exp_avg" if group["hidden"] else "momentum_buffer"
            if any(others in self.state.get(p, {}) for p in group["params"]):
                raise ConfigError(
                    "trainer.resume: other matrices were hidden in the checkpoint; set optimizer.groups back, or take "
                    "the weights alone: trainer.init_from"
                )
        self.checked = True


def refuse_others(hidden: list[dict[str, Any]]) -> None:
    """Refuse parameters that are no matrices."""
    for group in hidden:
        if shapes := [tuple(p.shape) for p in group["params"] if p.dim() != 2]:
            raise ConfigError(
                f"optimizer.groups: hidden=true matches a parameter of shape {shapes[0]}, and Muon takes two "
                "dimensions; match matrices only"
            )


def refuse_without_effect(groups: list[dict[str, Any]]) -> None:
    """Refuse settings that only the other part has."""
    for group in groups:
        for name in OTHERS[group["hidden"]]:
            if name in group:
                part, hidden = ("Muon", "false") if group["hidden"] else ("AdamW", "true")
                raise ConfigError(
                    f"optimizer.groups: {name}={group[name]} has no effect on parameters that are stepped by {part}; "
                    f"match others, or for matrices give hidden: {hidden}"
                )
