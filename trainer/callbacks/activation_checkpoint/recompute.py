"""Runs a block so that it keeps its inputs, or its inputs and the results of costly operations, and runs again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Of CPU and CUDA. An operation that this version of torch lacks is never met.
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


class Recompute:
    """A block's `forward` that runs again in the backward pass (Chen et al. 2016, arXiv:1604.06174).

    The second run leaves the running statistics of BatchNorm alone. In a compiled block, only the graph of the forward
    pass changes them.

    Dynamo traces `__call__`, so a compiled block has the recomputation in its graph. Dynamo would skip a
    `functools.partial` of torch's `checkpoint`, and compile nothing.

    Args:
        block: Its `forward` is run.
        selective: Keep the results of matrix products and of attention, and recompute the rest.

    Attributes:
        on: Recompute. False runs `forward` as it is.
    """

    def __init__(self, block: nn.Module, selective: bool) -> None:
        self.forward, self.on = block.forward, True
        self.knobs: dict[str, Any] = {"context_fn": CONTEXTS} if selective else {}
        self.norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        knobs = self.knobs
        if self.norms and not torch.compiler.is_compiling():
            knobs = {"context_fn": partial(contexts_for, self.norms, self.knobs.get("context_fn"))}
        return checkpoint(self.forward, *args, use_reentrant=False, **knobs, **kwargs)


def contexts_for(norms: Sequence[_BatchNorm], own: Callable[[], Any] | None) -> tuple[Any, Any]:
    """Return the contexts of the first run and of the second, in which running statistics stay."""
    first, second = own() if own else (nullcontext(), nullcontext())
    return first, statistics_kept(norms, second)


@contextmanager
def statistics_kept(norms: Sequence[_BatchNorm], inner: Any) -> Iterator[None]:
    """Let these layers save the same tensors for the backward pass, and change no buffer.

    A momentum of 0 gives the batch no weight. The count of batches is a copy's, for a run may end before a layer.
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
    """Decide for one operation whether its result is kept.

    Attention with dropout is recomputed. A second run that took the kept result would draw no random numbers, and all
    dropout that follows would get other ones.
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
