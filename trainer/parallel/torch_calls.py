"""Calls torch's backward pass and optimizers without their Python wrappers, unless something uses the wrappers.

A wrapper checks arguments, opens a profiler's region and calls hooks, which takes a third of a small model's step. The
kernels, their order and their bits are the same. The private functions of torch for this are called only in this file.
If this torch lacks one, the public functions are called.
"""

import contextvars
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

TORCH: Any = torch._C
AUTOGRAD: Any = getattr(TORCH, "_autograd", None)
ENGINE: Any = getattr(Variable, "_execution_engine", None)
PUBLIC = Tensor.backward, torch.autograd.backward  # libraries may replace them
NEEDED = (
    (TORCH, "_len_torch_function_stack"), (TORCH, "_set_grad_enabled"), (TORCH, "_stash_obj_in_tls"),
    (TORCH, "_remove_obj_from_tls"), (AUTOGRAD, "_profiler_enabled"), (ENGINE, "run_backward"),
    (optimizers, "_global_optimizer_pre_hooks"), (optimizers, "_global_optimizer_post_hooks"),
)  # fmt: skip
FOUND = all(hasattr(owner, name) for owner, name in NEEDED)
LOG = logging.getLogger("torch.autograd.graph")  # logs each node with TORCH_LOGS=+autograd


def defer_dynamo() -> None:
    """Let optimizers work without `torch._dynamo` until something else imports it.

    torch disables tracing in some methods of its optimizers. The first call of one imports dynamo for that: a second of
    the start, and 70 MiB, of a process that may compile nothing.
    """
    for method in vars(Optimizer).values():
        function = getattr(method, "__wrapped__", None)
        disables = getattr(getattr(method, "__code__", None), "co_qualname", "") == "_disable_dynamo.<locals>.inner"
        if FOUND and disables and function and not hasattr(function, "__dynamo_disable"):
            function.__dynamo_disable = _untraced(function)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what torch's wrapper calls instead of `function`: the function itself while no dynamo could trace it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        function.__dynamo_disable = torch._dynamo.disable(function, wrapping=False)  # pyright: ignore[reportFunctionMemberAccess]
        return function.__dynamo_disable(*args, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]

    return call


def backward(loss: Tensor) -> None:
    """Do the same as `loss.backward()`."""
    if (
        not FOUND or LOG.isEnabledFor(logging.DEBUG) or torch.is_anomaly_enabled()
        or type(loss) is not Tensor or loss.dim() or TORCH._len_torch_function_stack()
        or (Tensor.backward, torch.autograd.backward) != PUBLIC
    ):  # fmt: skip
        return loss.backward()
    TORCH._stash_obj_in_tls("context", contextvars.copy_context())  # for a device's thread that compiles
    try:
        ENGINE.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    finally:
        TORCH._remove_obj_from_tls("context")


def stepper(optimizer: Optimizer) -> Callable[[], Any]:
    """Return a function that does the same as `optimizer.step()`."""
    kind = type(optimizer)
    inner = unwrapped(kind) if FOUND else None

    def public() -> None:
        optimizer.step()

    if inner is None or optimizer.defaults.get("differentiable"):
        return public
    hooks = (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks,
    )  # fmt: skip
    own, wrapped = vars(optimizer), kind.step

    def step() -> None:
        if any(hooks) or "step" in own or kind.step is not wrapped or AUTOGRAD._profiler_enabled():
            return public()
        before = torch.is_grad_enabled()
        TORCH._set_grad_enabled(False)
        try:
            inner(optimizer)
        finally:
            TORCH._set_grad_enabled(before)

    return step


def unwrapped(kind: type[Optimizer]) -> Callable[[Optimizer], Any] | None:
    """Return the step of one of torch's own optimizer classes without its wrappers; None for another class."""
    hooked = getattr(kind, "step", None)
    graded = getattr(hooked, "__wrapped__", None)
    inner = getattr(graded, "__wrapped__", None)
    names = [getattr(getattr(f, "__code__", None), "co_qualname", "") for f in (hooked, graded)]
    wrappers = [name.partition(".<locals>")[0] for name in names]
    known = wrappers == ["Optimizer.profile_hook_step", "_use_grad_for_differentiable"]
    return inner if known and kind.__module__.startswith("torch.optim.") else None
