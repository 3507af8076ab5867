"""Trades activation memory for FLOPs or for copies to the host, block by block."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal

from torch import nn

from trainer.annotated import AtMost, NonNegativeFloat, PositiveInt
from trainer.callback import Callback, Role, Symptom
from trainer.callbacks.activation_checkpoint import budget as budgets
from trainer.callbacks.activation_checkpoint.offload import Copies, Offload
from trainer.callbacks.activation_checkpoint.recompute import Recompute
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.errors import ConfigError
from trainer.log import log
from trainer.parallel.blocks import find_blocks

KEY = "callbacks.activation_checkpoint"
# The fractions of a block that are recomputed (selective: norms and activation functions) and of its activations that
# are kept, as the card measures them.
RECOMPUTED = {"full": 1.0, "selective": 0.1, "offload": 0.0}
KEPT = {"full": 0.1, "selective": 0.63, "offload": 0.05}
CONFLICTS: dict[str, dict[str | Role, str]] = {
    "offload": {
        Role.COMPILE: "policy=offload hooks what a block saves, and Dynamo breaks the block's graph there; use "
        "policy=full or policy=selective",
    },
    "budget": {
        "eager_kernels": "only Inductor holds compiled blocks to a budget; set callbacks.compile.backend=inductor, or "
        "use every=2 or policy=selective instead of budget",
        Role.SPLIT: "budget measures all blocks on each rank, but a stage runs only its own; use every=2 or "
        "policy=selective instead of budget",
    },
}


class ActivationCheckpoint(Callback):
    """Recomputes blocks in the backward pass, or moves what they save to the host. Bits do not change.

    Papers: Chen et al. 2016, arXiv:1604.06174 (`full`); Korthikanti et al. 2022, arXiv:2205.05198 (`selective`); Rhu et
    al. 2016, arXiv:1602.08124 (`offload`). With `compile`, torch's partitioner meets the `budget` inside each compiled
    graph.
    """

    role = Role.RECOMPUTE
    remedies = {Symptom.MEMORY: [{}]}

    def __init__(
        self,
        blocks: list[str] | None = None,
        every: PositiveInt = 1,
        policy: Literal["full", "selective", "offload"] = "full",
        budget: Annotated[NonNegativeFloat, AtMost(1)] | None = None,
    ) -> None:
        if budget is not None:
            other = f"every={every}" if every > 1 else f"policy={policy}" if policy != "full" else ""
            if other:
                reason = f"chooses the blocks whose recomputation costs least, so {other} has no place"
                raise ConfigError(f"{KEY}.budget={budget}: {reason}; leave one out")
        self.blocks, self.every, self.policy, self.budget = blocks, every, policy, budget
        refused = "offload" if policy == "offload" else "budget" if budget is not None else ""
        self.conflicts = CONFLICTS.get(refused, {})
        self.wrapped: dict[nn.Module, Recompute] = {}

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        return [Variant({"policy": "selective"}), Variant({})]

    def cost(self) -> Cost:
        if self.budget is not None:
            return Cost(recomputes=1.0 - self.budget, keeps=self.budget)
        return Cost(recomputes=RECOMPUTED[self.policy] / self.every, keeps=1 - (1 - KEPT[self.policy]) / self.every)

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        if self.budget is not None and any(other.role is Role.COMPILE for other in trainer.callbacks.values()):
            return self._limit_compiled(trainer, model)
        found = find_blocks(trainer.recipe, model, self.blocks, f"{KEY}.blocks")
        blocks = list(dict.fromkeys(found))[:: self.every]  # a list may contain a module several times
        if self.budget is not None:
            refuse_nested(blocks, self.budget)
        if self.policy == "offload":
            if trainer.device.type == "cpu":
                log.warning(
                    "activation_checkpoint: policy=offload frees nothing on the CPU, whose memory is the host's"
                )
            copies = Copies(trainer.device)
            for block in blocks:
                block.forward = Offload(block.forward, block, copies)
        else:
            for block in blocks:
                block.forward = self.wrapped[block] = Recompute(block, self.policy == "selective")
        return model

    def _limit_compiled(self, trainer: Context, model: nn.Module) -> nn.Module:
        """Leave the choice to the compiler. Loading Inductor here takes a second."""
        assert self.budget is not None
        if self.blocks is not None:
            raise ConfigError(
                f"{KEY}.blocks=[{','.join(self.blocks)}]: with budget and compile, the compiled blocks are held to the "
                "budget; name them in callbacks.compile.blocks instead"
            )
        from trainer.callbacks.activation_checkpoint.compiled import set_budget

        set_budget(self.budget, trainer.undo)
        return model

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        if self.budget is None or not self.wrapped:
            return
        own = budgets.measure(trainer.module, self.wrapped, trainer.device, partial(run_pass, batch))
        sizes = budgets.agree(own, trainer.ranks.gather)
        if sizes.inputs > self.budget * sizes.plain > 0:
            share = sizes.inputs / sizes.plain
            log.warning("%s.budget=%.4g: the inputs of the blocks alone are %.4g", KEY, self.budget, share)
        self._choose(budgets.choose(sizes, self.budget))
        log.info(
            "rehearsal: budget=%.4g recomputes blocks %s of %d: keeps %.4g of %.4g MiB, runs %.4g of %.4g ms again",
            self.budget, self.recomputed, len(self.wrapped), sizes.kept(self.recomputed) / 2**20, sizes.plain / 2**20,
            sum(sizes.seconds[i] for i in self.recomputed) * 1000, sum(sizes.seconds) * 1000,
        )  # fmt: skip

    def _choose(self, recomputed: list[int]) -> None:
        self.recomputed = recomputed
        for index, forward in enumerate(self.wrapped.values()):
            forward.on = index in recomputed

    def state_dict(self) -> dict[str, Any]:
        if self.budget is None or not self.wrapped:
            return {}
        return {"budget": self.budget, "blocks": len(self.wrapped), "recomputed": self.recomputed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the checkpoint's choice if it was for the same budget and number of blocks."""
        if self.budget is not None and (state.get("budget"), state.get("blocks")) == (self.budget, len(self.wrapped)):
            self._choose(state["recomputed"])
            log.info("activation_checkpoint: recomputes blocks %s, as in the checkpoint", self.recomputed)


def refuse_nested(blocks: list[nn.Module], budget: float) -> None:
    """Refuse a block inside another one, with which it would be measured and recomputed."""
    own = set(blocks)
    for outer in blocks:
        for inner in own.intersection(outer.modules()) - {outer}:
            names = f"a block {type(inner).__name__} lies inside a block {type(outer).__name__}"
            raise ConfigError(f"{KEY}.budget={budget}: {names}; name one of them in {KEY}.blocks")
