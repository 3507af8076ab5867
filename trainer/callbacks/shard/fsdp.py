"""The model in torch's FSDP2: each rank keeps some rows of every parameter, its gradient and its optimizer state."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainer.checkpoint.serialize import load_optimizer_state, optimizer_state
from trainer.checkpoint.sharded import parts_of, read_like
from trainer.comm.bucket import Bucket, Piece
from trainer.comm.mesh import forget_groups
from trainer.comm.phases import Phase, during
from trainer.comm.ranks import share, share_buffers
from trainer.comm.reduce import AllReduce
from trainer.comm.slices import cut_like, is_sharded, local, span
from trainer.comm.two_level import TwoLevel
from trainer.errors import ConfigError, DataError
from trainer.parallel.meta import initialise, on_meta, refuse_without_reset
from trainer.parallel.strategy import Described, trained
from trainer.parallel.warmup import constants, integer_buffers


class FSDP(Described):
    """Shards the model by rows. A block's parameters are whole only while the block computes.

    Papers: Rajbhandari et al. 2020, arXiv:1910.02054, stage 3; Zhao et al. 2023, arXiv:2304.11277. Parameters and
    gradients keep their dtype, because torch's MixedPrecisionPolicy would give other numbers than autocast. Nothing is
    sent between the micro-batches of a step, so each rank then has whole gradients. Rank 0's weights are broadcast; a
    model on the meta device is initialised by each module's `reset_parameters`.

    Args:
        blocks: The modules that are gathered one by one; the rest of the model is one more unit.
        mesh: One-dimensional mesh of the ranks that share the rows.
        across: Averages over several such groups of ranks; None if there is one group.
        copied: Whether `copy` will be called.
    """

    lockstep, syncing, whole = True, True, False
    owned: Collection[Tensor] | None = None
    bucket_bytes = 0

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        across: "AcrossNodes | None",
        device: torch.device,
        *,
        reshard: bool,
        offload: bool,
        copied: bool,
        step: Callable[[], int],
    ) -> None:
        self.data_rank, self.data_world = dist.get_rank(), dist.get_world_size()
        self.mesh, self.across, self.device, self.reshard, self.step = mesh, across, device, reshard, step
        self.inside = mesh.get_group()
        self.replicas = across.replicas if across else None
        self.constant_buffers: frozenset[str] = frozenset()
        self.hooks: list[Any] = []
        self.models: list[nn.Module] = []  # the sharded models: the trained one and its copies
        self.policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
        self.home = torch.device("cpu") if offload else device  # of the rows
        names = {child: name for name, child in module.named_modules()}
        self.blocks = [names[block] for block in blocks if block is not module]
        refuse_unshardable(module, self.blocks)
        source = self._shared_or_meta(module)
        self.skeleton = without_memory(module) if copied else None
        self.module = self._lay_out(module)
        if source:
            module.to_empty(device=self.home)
            initialise(module, source, device)
            share(chain_of_tensors(module), self.replicas)
            share_buffers(module, dist.group.WORLD)
        self.parameters = trained(module)
        if self.replicas:
            for unit in units(module):
                own = [p for p in own_parameters(unit) if p.requires_grad]
                unit.set_all_reduce_hook(partial(self._reduce_across, own))
        self.model: nn.Module = Sharded(self)

    def _shared_or_meta(self, model: nn.Module) -> nn.Module | None:
        """Broadcast rank 0's weights and buffers; for a model on the meta device return a copy to initialise from."""
        if on_meta(model):
            refuse_without_reset(model)
            return deepcopy(model)
        share(chain_of_tensors(model), dist.group.WORLD)
        return None

    def _lay_out(self, model: nn.Module) -> nn.Module:
        for name in (*reversed(self.blocks), ""):  # inner blocks first
            module = model.get_submodule(name)
            again = self.reshard if name else None  # the root's parameters are needed immediately in the backward pass
            fully_shard(module, mesh=self.mesh, reshard_after_forward=again, offload_policy=self.policy)
        for child in model.modules():
            child.register_load_state_dict_pre_hook(take_rows)
        for group in chain.from_iterable(map(groups_of, units(model))):  # on CUDA, a wait between streams
            group.wait_for_unshard = during(Phase.COMMUNICATION)(group.wait_for_unshard)
        self.hooks.append(model.register_forward_hook(self._end_evaluation))
        self.models.append(model)
        return model

    def reduce_gradients(self) -> None:
        raise NotImplementedError("callbacks that reduce apart from passes refuse strategies in lockstep")

    def sync_gradients(self, on: bool) -> None:
        self.syncing = on
        for unit in units(self.module):
            unit.set_requires_gradient_sync(on, recurse=False)
            if not self.reshard:
                unit.set_reshard_after_backward(on, recurse=False)

    def clip(self, max_norm: float | None) -> Tensor:
        grads = [local(p.grad) for p in self.parameters if p.grad is not None]
        norm = get_total_norm(grads)
        square = norm.to(self.device, torch.float64).square()
        dist.all_reduce(square, group=self.inside)
        norm = square.sqrt().to(norm.dtype)
        if max_norm is not None and grads:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].device))
        return norm

    def zero_loss(self, run: Callable[[], Tensor]) -> Tensor:
        """Run the pass, because all ranks gather the parameters together, and backpropagate zeros.

        The same parameters get gradients as from the loss, so each rank sends as many bytes as the others.
        """
        outputs: list[Tensor] = []
        hook = self.model.register_forward_hook(lambda _, __, output: outputs.extend(tensors(output)))
        try:
            loss = run()
        finally:
            hook.remove()
        outputs = [output for output in outputs if output.requires_grad]
        if not outputs:
            raise DataError(
                "recipe.loss(): does not call the model on a micro-batch of weight 0, and the other ranks wait for "
                "its forward pass; call the model on every batch"
            )
        for output in outputs:
            output.register_hook(torch.zeros_like)
        if not loss.requires_grad:
            loss = torch.stack([output.sum().float() for output in outputs]).sum()
        return (loss * 0.0).nan_to_num(0.0)

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Run one pass, in which torch lays out the units, and find the buffers that never change."""
        before = integer_buffers(self.module)
        run_pass()
        self.constant_buffers = constants(self.module, before, self.device)

    def buckets(self) -> list[list[int]]:
        """Return the parameters of each unit, in the memory order of their rows."""
        index = {p: i for i, p in enumerate(self.parameters)}
        return [[index[p] for p in own_parameters(unit) if p in index] for unit in units(self.module)]

    def save(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        model, state = self.module.state_dict(), optimizer_state(optimizer, self.module)
        return {"model": parts_of(model, self.data_rank), "optimizer": parts_of(state, self.data_rank)}

    def own_part(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return parts_of(state, self.data_rank) if is_sharded(state) else None

    def load(self, optimizer: Optimizer, sections: Mapping[str, Any]) -> None:
        own = self.module.state_dict()
        self.module.load_state_dict({name: read_like(own.get(name), part) for name, part in sections["model"].items()})
        if "optimizer" in sections:
            own = dict(self.module.named_parameters())
            state = {name: read_like(own.get(name), values) for name, values in sections["optimizer"].items()}
            load_optimizer_state(optimizer, self.module, state)

    def copy(self) -> nn.Module:
        assert self.skeleton is not None
        model = self._lay_out(deepcopy(self.skeleton))
        model.to_empty(device=self.home)
        with torch.no_grad():
            for own, other in zip(chain_of_tensors(model), chain_of_tensors(self.module), strict=True):
                own.copy_(other)
        for unit in units(model):  # torch lays out memory in the first all-gather
            unit.unshard()
            unit.reshard()
        return model

    def share_buffers(self, *models: nn.Module) -> None:
        """Broadcast the buffers of rank 0's models, by default the trained one. A collective."""
        for model in models or (self.module,):
            share_buffers(model, dist.group.WORLD, self.constant_buffers)

    def unwrap(self) -> None:
        """Release the trainer and the process group. The model stays sharded, and can no longer be called."""
        self.step, self.across = int, None
        for hook in self.hooks:
            hook.remove()
        forget_groups(self.mesh)
        # Autograd graphs hold FSDP's hooks, in a cycle that Python's collector can't see.
        for unit in chain.from_iterable(map(units, self.models)):
            for group in groups_of(unit):
                group.mesh_info.shard_process_group = None

    def _end_evaluation(self, model: nn.Module, *_: Any) -> None:
        """Free whole parameters after a pass without a backward pass."""
        if not torch.is_grad_enabled():
            for unit in units(model):
                unit.reshard()

    def _reduce_across(self, parameters: list[nn.Parameter], rows: Tensor) -> None:
        assert self.across
        self.across(rows, Bucket.of(parameters, self.step()))


class Sharded(nn.Module):
    """The model of the training passes. Its buffers are broadcast once per step, as in DDP."""

    def __init__(self, strategy: FSDP) -> None:
        super().__init__()
        self.module, self.strategy, self.begins = strategy.module, strategy, True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            if self.begins:
                self.strategy.share_buffers(self.module)
            self.begins = self.strategy.syncing
        return self.module(*args, **kwargs)


class AcrossNodes(TwoLevel):
    """Averages across nodes the rows that `fully_shard` has averaged inside each node."""

    def __init__(self, inside: dist.ProcessGroup, across: AllReduce) -> None:
        super().__init__(inside, across)
        self.replicas = across.group if self.nodes > 1 else None

    def own(self, bucket: Bucket) -> Bucket:
        pieces = [Piece(p, *elements(p, self.local_rank, self.per_node)) for p, _, _ in bucket.pieces]
        some = [piece for piece in pieces if piece.start < piece.stop]
        return Bucket(some, bucket.step, bucket.kind, bucket.whole)

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """Average in place. `flat` has this rank's rows of each parameter, padded to rank 0's size."""
        sizes = [stop - start for start, stop in (elements(p, 0, self.per_node) for p, _, _ in bucket.pieces)]
        if sum(sizes) != flat.numel():
            raise ConfigError(
                "callbacks.shard.hybrid: some parameters have no gradient in this step, so the rows of the others "
                "can't be distinguished; set callbacks.shard.hybrid=false, or use every parameter in each loss"
            )
        own = self.own(bucket)
        lengths = {p: stop - start for p, start, stop in own.pieces}
        whole = zip(bucket.pieces, flat.split(sizes), strict=True)
        views = [part[: lengths[p]] for (p, _, _), part in whole if p in lengths]
        if views:
            mean = self.across(torch.cat(views), own)
            for view, part in zip(views, mean.split(list(lengths.values())), strict=True):
                view.copy_(part)
        return flat


def elements(p: Tensor, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range (start, stop) of the elements in a rank's rows of a parameter."""
    start, stop = span(p.shape[0], rank, ranks)
    row = math.prod(p.shape[1:])
    return start * row, stop * row


def units(model: nn.Module) -> list[FSDPModule]:
    """List the units, which are gathered one by one; the root comes first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(unit: FSDPModule) -> Sequence[Any]:
    """List torch's parameter groups of a unit, which are gathered together."""
    return getattr(unit._get_fsdp_state(), "_fsdp_param_groups", ())


def own_parameters(unit: Any) -> list[nn.Parameter]:
    """List a unit's parameters, except those of units inside it, in the order of `fully_shard`."""
    seen: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in seen and not isinstance(child, FSDPModule):
                visit(child)
        seen[module] = None

    visit(unit)
    return list(dict.fromkeys(p for module in seen for p in module.parameters(recurse=False)))


def refuse_unshardable(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ConfigError for parameters that FSDP2 can't shard, or would refuse in the first pass."""
    members: dict[str, dict[nn.Parameter, str]] = {name: {} for name in ("", *blocks)}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = max((block for block in blocks if name.startswith(f"{block}.")), key=len, default="")
        members[unit].setdefault(p, name)
    key, out = "callbacks.shard.stage=3", "or use callbacks.shard.stage=2"
    for unit, named in members.items():
        if scalars := [name for p, name in named.items() if p.dim() == 0]:
            raise ConfigError(f"{key}: {scalars[0]} has no dimension, so no rows; give it the shape (1,), {out}")
        dtypes = {p.dtype: name for p, name in named.items() if p.requires_grad}
        if len(dtypes) > 1:
            pair = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
            raise ConfigError(
                f"{key}: parameters of {unit or 'the model outside of its blocks'} have different dtypes ({pair}), "
                f"and are sent together; give them one dtype, {out}"
            )
    counts = Counter(p for named in members.values() for p in named)
    if shared := [[named[p] for named in members.values() if p in named] for p, count in counts.items() if count > 1]:
        raise ConfigError(
            f"{key}: {' and '.join(shared[0])} are one parameter in two blocks; name other blocks by "
            f"callbacks.shard.blocks or recipe.blocks, {out}"
        )


def without_memory(model: nn.Module) -> nn.Module:
    """Copy a model and its buffers, with the copy's parameters on the meta device."""
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in model.parameters()}
    return deepcopy(model, memo)


def take_rows(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors in `state` with this rank's rows, before a module loads them."""
    for name, p in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(p, DTensor) and type(value) is Tensor and value.shape == p.shape:
            local(p.detach()).copy_(cut_like(value, p))
            state[prefix + name] = p.detach()


def chain_of_tensors(model: nn.Module) -> list[Tensor]:
    """List this rank's parts of the parameters, and the buffers."""
    return [*(local(p.detach()) for p in model.parameters()), *model.buffers()]


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        mapping = vars(value) if is_dataclass(value) and not isinstance(value, Mapping) else value
        items = mapping.values() if isinstance(mapping, Mapping) else mapping
        for item in items if isinstance(mapping, Mapping | list | tuple) else ():
            yield from tensors(item)
