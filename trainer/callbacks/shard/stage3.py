"""Stage 3: the mesh of ranks that share FSDP2's rows, and its conflicts."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.callback import Role
from trainer.callbacks.shard.fsdp import FSDP, AcrossNodes
from trainer.comm.mesh import Mesh
from trainer.comm.reduce import AllReduce
from trainer.context import Context
from trainer.errors import ConfigError
from trainer.log import log
from trainer.parallel.blocks import find_blocks


def two_levels(trainer: Context, hybrid: bool | int) -> tuple[DeviceMesh, AcrossNodes]:
    """Return this rank's group, inside which FSDP2 averages, and the mean across groups. A collective."""
    world = trainer.world
    per_group = trainer.ranks.ranks_per_node("shard") if hybrid is True else int(hybrid)
    if per_group == 1 or world % per_group:
        why = "a node has one rank" if per_group == 1 else f"does not divide the {world} ranks"
        raise ConfigError(
            f"callbacks.shard.hybrid={str(hybrid).lower()}: {why}; give a divisor of {world} above 1, or false"
        )
    if per_group == world:
        log.info("shard: hybrid has one group of %d ranks, so nothing is averaged across", world)
    mesh = Mesh(trainer.ranks, replicate=world // per_group, shard=per_group)
    return mesh.along("shard"), AcrossNodes(mesh.groups["shard"], AllReduce(mesh.groups["replicate"]))


def fully_shard(
    trainer: Context,
    model: nn.Module,
    mesh: DeviceMesh,
    across: AcrossNodes | None,
    blocks: list[str] | None,
    **knobs: bool,
) -> FSDP:
    """Shard the model by rows over the ranks of `mesh`."""
    refuse_hooks(model)
    found = find_blocks(trainer.recipe, model, blocks, "callbacks.shard.blocks")
    copied = any(Role.AVERAGE in (callback.role, *callback.also) for callback in trainer.callbacks.values())
    strategy = FSDP(model, found, mesh, across, trainer.device, copied=copied, step=lambda: trainer.step, **knobs)
    units = len(strategy.buckets())
    if knobs["offload"] and trainer.device.type == "cpu":
        log.warning("shard: offload=true frees nothing on the CPU, whose memory is the host's")
    log.info("shard: %d units in rows over %d of %d ranks", units, mesh.size(), trainer.world)
    return strategy


class BlockOrder:
    """Hashes the blocks that this rank calls in a step. If ranks call different blocks, their rows get mixed up."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.number = 0
        self.hooks = [block.register_forward_pre_hook(partial(self._note, i)) for i, block in enumerate(blocks, 1)]

    def _note(self, i: int, block: nn.Module, inputs: Any) -> None:
        if block.training:
            self.number = (self.number * 1_000_003 + i) % (1 << 40)

    def compare(self, trainer: Context) -> None:
        """Compare the step's blocks over the ranks, and start a new step. A collective."""
        own, self.number = self.number, 0
        if trainer.ranks.agree((own,))() != (own * trainer.world,):
            raise ConfigError(
                f"callbacks.shard.stage=3: ranks called different blocks in step {trainer.step + 1}, and got rows of "
                "each other's; skip the same blocks on all ranks, or use callbacks.shard.stage=1 with "
                "trainer.ddp.find_unused_parameters=true"
            )


def refuse_hooks(model: nn.Module) -> None:
    """Raise ConfigError if a parameter has a gradient hook, because FSDP2's replacement parameters lose it."""
    for name, p in model.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ConfigError(
                f"callbacks.shard.stage=3: {name} has a hook for its gradient, and rows of it would have none; set "
                "callbacks.shard.stage=2, or change the gradient in a callback's on_before_optimizer_step"
            )


def conflicts(offload: bool) -> dict[Any, str]:
    """Return the conflicts of stage 3, in the form of `Callback.conflicts`."""
    rows = "stage=3 gives each rank the mean of its own rows only"
    refused: dict[Any, str] = {
        Role.BATCH: "stage=3 communicates in each forward pass, so all ranks must make equally many; use stage=1",
        Role.REDUCE: f"{rows}; use callbacks.shard.hybrid for two levels, or stage=2",
        "defers": f"{rows}, as soon as they are summed; leave one out",
        "compresses_all": f"{rows}, and torch sums them; use callbacks.shard.hybrid with "
        "callbacks.grad_compress.level=inter, or stage=2",
        "find_unused_parameters": "FSDP2 has no search for unused parameters; set "
        "trainer.ddp.find_unused_parameters=false, or use stage=1",
        "sync_batch_norm": "FSDP2 was not tried with a BatchNorm that communicates; set "
        "trainer.sync_batch_norm=false, or use stage=2",
        "bf16_params": "FSDP2 gathers the float32 weights that modules read; use trainer.precision=bf16, or stage=2",
        "bf16_weights": "a step rounds whole parameters, and a rank has only some of their rows; set "
        "trainer.master_weights=true, or use stage=2",
        "static_graph": "FSDP2 has no such mode; set trainer.ddp.static_graph=false, or use stage=1",
        "gradient_as_bucket_view": "FSDP2 has no buckets; set trainer.ddp.gradient_as_bucket_view=null, or use stage=1",
    }
    if offload:
        refused["fp16"] = (
            "the loss scale is on the device, and offload has gradients on the host; use trainer.precision=bf16, or "
            "callbacks.shard.offload=false"
        )
    return refused
