"""Computes the bytes that stages need, and the bytes that ranks have for them."""

from collections.abc import Sequence

from torch import nn

from trainer.callback import Role
from trainer.callbacks.pipeline.partition import Sizes, StageMemory
from trainer.callbacks.pipeline.profile_blocks import Trial
from trainer.callbacks.pipeline.stages import KEY
from trainer.context import Context
from trainer.errors import ConfigError
from trainer.parallel.layout import part_sums
from trainer.parallel.memory_search import state_share

MIB = 1 << 20


def stage_memory(
    trainer: Context,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    trials: Sequence[Trial],
    limits: Sequence[float],
    in_flight: Sequence[int],
    versions: int,
) -> StageMemory:
    """Return the bytes that stages need and the bytes available to them.

    There is one trial per rank, or none if the model was not tried; saved bytes then count as 0. Each of the `versions`
    of the weights has gradients.
    """
    of_state = state_bytes(trainer)
    averaged = has(trainer, Role.AVERAGE)

    def held(p: nn.Parameter) -> float:
        return p.nbytes * (1 + averaged + (2 * versions - 1 + of_state if p.requires_grad else 0))

    saved, stream = [0.0] * (len(blocks) + 2), 0
    if trials:
        saved, stream = [max(column) for column in zip(*(t.saved for t in trials), strict=True)], trials[0].stream
    if trials and has(trainer, Role.RECOMPUTE):  # a recomputed block saves at least its input
        saved = [saved[0], *(min(each, stream) for each in saved[1:-1]), saved[-1]]
    return StageMemory(Sizes(part_sums(model, blocks, held), saved, stream), limits, in_flight, trainer.plan.accumulate)


def has(trainer: Context, role: Role) -> bool:
    return any(role in (other.role, *other.also) for other in trainer.callbacks.values())


def state_bytes(trainer: Context) -> float:
    """Return the bytes of optimizer state per parameter byte. A stage's replicas may share the state."""
    split = any(Role.SPLIT in other.shares_with for other in trainer.callbacks.values())
    replicas = trainer.world // max(other.stages for other in trainer.callbacks.values()) if split else 1
    return state_share(trainer.new_optimizer, trainer.device) / replicas


def refuse(memory: StageMemory) -> ConfigError:
    stage, needs = memory.tightest()
    fixed, saved, messages = (f"{need / MIB:.4g}" for need in needs)
    limit = f"{memory.limits[stage] / MIB:.4g}"
    if memory.half:
        limit += f", half of its rank's {2 * memory.limits[stage] / MIB:.4g} for two stages"
    return ConfigError(
        f"{KEY}.cut=auto: no cut fits into memory: at best stage {stage} needs {sum(needs) / MIB:.4g} MiB of "
        f"{limit} ({fixed} for parameters, gradients and optimizer state, {saved} for "
        f"activations of {memory.in_flight[stage]} micro-batches, {messages} for messages); use more stages, a smaller "
        f"micro_batch, activation_checkpoint or shard, or set {KEY}.cut, which is not checked"
    )
