"""Recomputes a block in its backward pass, from its inputs or also from the results of costly operations."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.errors import ConfigError

# Operations on CPU and CUDA. Those that this version of torch lacks never occur.
PRODUCTS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::convolution", "aten::_scaled_mm",
    "aten::_grouped_mm", "aten::_scaled_grouped_mm",
}  # fmt: skip
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward", "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flex_attention",
}  # fmt: skip
KEPT = PRODUCTS | ATTENTION
Place = tuple[nn.Module, str]  # a module, and the name of a buffer in it
Buffers = dict[Place, Tensor]


class Recompute:
    """A block's `forward` that is rerun in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    The rerun starts with the first run's buffers and does not change the block's own, such as BatchNorm's running
    statistics or spectral_norm's vectors. Dynamo traces `__call__`, so a compiled block's graph contains the
    recomputation, and its forward graph changes the buffers. A `functools.partial` of torch's `checkpoint` would not be
    compiled.
    """

    def __init__(self, block: nn.Module, selective: bool) -> None:
        self.forward, self.on = block.forward, True
        self.knobs: dict[str, Any] = {"context_fn": CONTEXTS} if selective else {}
        self.norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        self.changing = Changing(m for m in block.modules() if not isinstance(m, _BatchNorm))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        knobs = self.knobs
        if (self.norms or self.changing.places) and not torch.compiler.is_compiling():
            knobs = {"context_fn": partial(contexts_for, self.norms, self.changing, self.knobs.get("context_fn"))}
        return checkpoint(self.forward, *args, use_reentrant=False, **knobs, **kwargs)


class Changing:
    """The buffers that a block's forward passes change, and that a rerun must not change again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.places = [(module, name) for module in modules for name in module._buffers]
        self.moving: set[Place] | None = None  # the buffers that the very first pass changed

    @contextmanager
    def noted(self, before: Buffers, inner: Any) -> Iterator[None]:
        """Store in `before` the old values of the buffers that a first run changes."""
        found = {place: value for place in self.places if (value := self._value(place)) is not None}
        versions = {place: value._version for place, value in found.items()}
        moving = found.keys() if self.moving is None else self.moving
        before |= {place: value.clone() for place, value in found.items() if place in moving}
        with inner:
            yield
        changed = {p for p, value in found.items() if self._value(p) is not value or value._version != versions[p]}
        self.moving = changed if self.moving is None else self.moving
        for module, name in changed - self.moving:
            raise ConfigError(
                f"callbacks.activation_checkpoint: {type(module).__name__} changes its buffer {name} in a later "
                "forward pass, and not in the first; leave its block out by callbacks.activation_checkpoint.blocks"
            )
        for place in before.keys() - changed:
            del before[place]

    def _value(self, place: Place) -> Tensor | None:
        return place[0]._buffers.get(place[1])

    @contextmanager
    def kept(self, before: Buffers, inner: Any) -> Iterator[None]:
        """Give a rerun the buffers of `before`, and restore the current ones afterwards."""
        present = {(module, name): module._buffers[name] for module, name in before}
        for (module, name), value in before.items():
            module._buffers[name] = value.clone()
        try:
            with inner:
                yield
        finally:
            for (module, name), value in present.items():
                module._buffers[name] = value


def contexts_for(norms: Sequence[_BatchNorm], changing: Changing, own: Callable[[], Any] | None) -> tuple[Any, Any]:
    """Return the contexts of the first run and of the rerun, which preserves buffers."""
    first, second = own() if own else (nullcontext(), nullcontext())
    before: Buffers = {}
    return changing.noted(before, first), statistics_kept(norms, changing.kept(before, second))


@contextmanager
def statistics_kept(norms: Sequence[_BatchNorm], inner: Any) -> Iterator[None]:
    """Let these layers save the same tensors for the backward pass, but change no buffer.

    A momentum of 0 gives the batch no weight. The count of batches is kept in a copy, because a run may end early.
    """
    with ExitStack() as stack:
        for norm in norms:
            if not norm.training or norm.num_batches_tracked is None:
                continue
            for name, value in (("momentum", 0.0), ("num_batches_tracked", norm.num_batches_tracked.clone())):
                stack.callback(setattr, norm, name, getattr(norm, name))
                setattr(norm, name, value)
        stack.enter_context(inner)
        yield


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the result of an operation is kept.

    Attention with dropout is recomputed. If a rerun used a kept result, it would draw no random numbers there, so all
    later dropout would differ.
    """
    if op.name().partition(".")[0] not in KEPT or draws(op, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call of an operation draws random numbers for dropout."""
    schema = getattr(op, "_schema", None)  # a higher-order operator has none
    names = [argument.name for argument in schema.arguments] if schema else []
    return bool({**dict(zip(names, args)), **kwargs}.get("dropout_p"))


CONTEXTS = partial(create_selective_checkpoint_contexts, keep_products)
