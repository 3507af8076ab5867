"""Detects a loss or gradient that is not finite, or far above its usual size, before the optimizer uses it."""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from trainer.annotated import Above, PositiveInt
from trainer.callback import Callback, Role
from trainer.callbacks.nan_guard.rollback import buffers, copy_into, counts, state
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.errors import NumericsError
from trainer.log import log

UNIT, NORM_UNIT = 2.0**-16, 2.0**-36  # values are rounded to multiples, so that sums are exact in any order
LARGEST = 2**52
DECAY = 0.98  # decay of the running means that define a spike: about 50 steps
KNOWN = 20  # steps until the running means are used
STATE = ("usual", "taken", "in_a_row", "left_out")


class NanGuard(Callback):
    """Judges each step before the optimizer applies it, alike on all ranks: one collective of three numbers.

    `rollback` restores a copy at most `every` steps old (Chowdhery et al. 2022, arXiv:2204.02311, 5.1).
    """

    role = Role.GUARD

    def __init__(
        self,
        action: Literal["raise", "skip", "rollback"] = "skip",
        loss_spike: Annotated[float, Above(1)] | None = None,
        norm_spike: Annotated[float, Above(1)] | None = None,
        every: PositiveInt = 100,
        most: PositiveInt = 10,
    ) -> None:
        self.action, self.every, self.most = action, every, most
        self.spikes = {"loss": loss_spike, "gradient norm": norm_spike}
        self.usual = dict.fromkeys(self.spikes, 0.0)  # running means over the applied steps
        self.taken, self.in_a_row, self.copied_at = 0, 0, -1
        self.left_out: list[list[Any]] = []  # [first step, last step, why]
        self.copies: list[Tensor] = []

    def cost(self) -> Cost:
        return Cost(left_out="its checks and copies are not modelled")

    def on_before_optimizer_step(self, trainer) -> None:
        why = self._judge(trainer, *self._agreed(trainer))
        step = trainer.step + 1
        if not why:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        message = f"callbacks.nan_guard: step {step}: {why}"
        if self.action == "raise" or self.in_a_row > self.most:
            row = f", {self.in_a_row} in a row" if self.action != "raise" else ""
            fix = "a smaller learning rate, trainer.clip_norm, or callbacks.nan_guard.action=rollback"
            raise NumericsError(f"{message}{row}; try {fix}")
        first, now = step, list(state(trainer))
        # A rank may have more state than its copy, for example for parameters that only it steps.
        if not trainer.ranks.agree((int(len(now) != len(self.copies)),))()[0]:
            first = self.copied_at + 1
            copy_into(now, self.copies)
            for own, key, value in self.counts:
                own[key] = value
        else:
            copy_into(buffers(trainer), self.buffers)
            trainer.emit("on_step_undone")
        for p in trainer.parameters:
            p.grad = None
        self.left_out.append([first, step, why])
        trainer.emit("on_event", "skip", {"step": step, "first": first, "why": why})
        log.warning(
            "%s; %s", message, f"steps {first} to {step} are undone" if first < step else "the step is left out"
        )

    def on_fit_start(self, trainer) -> None:
        self.buffers = [buffer.clone() for buffer in buffers(trainer)]
        self._copy(trainer)  # so that a resumed run rolls back to the same state as an uninterrupted one

    def on_flush(self, trainer) -> None:
        """Copy at each checkpoint, so that a resume from it has the same copy."""
        self._copy(trainer)

    def on_step_end(self, trainer) -> None:
        copy_into(self.buffers, buffers(trainer))
        if trainer.metrics:
            trainer.metrics["train/left_out"] = sum(last - first + 1 for first, last, _ in self.left_out)
        if not self.copies or trainer.step % self.every == 0:
            self._copy(trainer)

    def _copy(self, trainer: Context) -> None:
        if self.action != "rollback" or trainer.step in (0, self.copied_at):  # at 0 an optimizer has no state yet
            return
        now = list(state(trainer))
        if len(now) != len(self.copies):
            pin = trainer.device.type == "cuda"
            self.copies = [torch.empty_like(t, device="cpu", pin_memory=pin) for t in now]
        copy_into(self.copies, now)
        self.counts = counts(trainer)
        self.copied_at = trainer.step

    @torch.no_grad()
    def _agreed(self, trainer: Context) -> tuple[int, float, float]:
        """Return the number of ranks with non-finite values, the mean loss, and the gradient's global norm.

        Waits for the device once. The norm is averaged, because its last bits may differ between unequal devices.
        """
        zero = torch.zeros((), dtype=torch.float64, device=trainer.device)
        weighed = zip(trainer.losses, trainer.data.weights, strict=True)
        total = sum((loss.double().sum() * weight for loss, weight in weighed if weight), zero)
        loss, norm = torch.stack([total, trainer.strategy.clip(None).to(zero)]).tolist()
        if trainer.scaler.is_enabled():  # fp16's scaler handles infinite gradients
            norm = 0.0
        bad = not (math.isfinite(loss) and math.isfinite(norm))
        bad, losses, norms = trainer.ranks.agree((int(bad), whole(loss, UNIT), whole(norm, NORM_UNIT)))()
        copies = trainer.world // trainer.strategy.data_world  # ranks that count the same samples
        return bad, losses * UNIT / copies / max(1, trainer.weight), norms * NORM_UNIT / trainer.world

    def _judge(self, trainer: Context, bad: int, loss: float, norm: float) -> str:
        """Return the reason to reject this step; empty to apply it."""
        if bad:
            return f"loss or gradient not finite on {bad} of {trainer.world} rank(s)"
        seen = {"loss": loss, "gradient norm": norm}
        for name, ratio in self.spikes.items():
            if ratio and self.taken >= KNOWN and seen[name] > ratio * self.usual[name] > 0:
                return f"{name} {seen[name]:.4g}, more than {ratio:g} times the usual {self.usual[name]:.4g}"
        self.taken += 1
        part = max(1 - DECAY, 1 / self.taken)
        for name, value in seen.items():
            self.usual[name] += part * (value - self.usual[name])
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in STATE:
            setattr(self, key, state[key])


def whole(value: float, unit: float) -> int:
    return round(max(-LARGEST, min(LARGEST, value / unit))) if math.isfinite(value) else 0
