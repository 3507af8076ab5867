"""Finds slow kernels from what torch reports: attention, the optimizer, TF32, graph breaks, and warnings."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

AMPERE = (8, 0)  # compute capability of the first GPUs with TF32
MATH = 0  # torch's number of the math kernel, of torch.nn.attention.SDPBackend

WARNINGS = {  # beginning of torch's text -> name
    "Grad strides do not match bucket view strides": "copied_gradients",
    "grad and param do not obey the gradient layout contract": "copied_gradients",
}


@contextmanager
def watch_attention(found: Counter[str]) -> Iterator[None]:
    """Count calls of scaled_dot_product_attention that use the math kernel, without waiting for the device."""
    attend: Any = functional.scaled_dot_product_attention

    def watched(*args: Any, **options: Any) -> Any:
        found["math_attention"] += takes_math(*args, **options)
        return attend(*args, **options)

    functional.scaled_dot_product_attention = watched
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attend


def takes_math(*args: Any, **options: Any) -> bool:
    try:
        return torch._fused_sdp_choice(*args, **options) == MATH
    except (TypeError, RuntimeError):  # arguments that attention itself will refuse
        return False


def watch_warnings(found: Counter[str], undo: ExitStack) -> None:
    """Count torch's warnings about slow paths, until `undo` closes. They are still shown."""
    show: Callable[..., Any] = warnings.showwarning

    def watched(message: Any, *args: Any, **options: Any) -> None:
        text = str(message)
        found.update(name for start, name in WARNINGS.items() if text.startswith(start))
        show(message, *args, **options)

    def restore() -> None:
        if warnings.showwarning is watched:
            warnings.showwarning = show

    warnings.showwarning = watched
    undo.callback(restore)


def look(optimizer: Optimizer, device: torch.device, precision: str) -> dict[str, float]:
    """Return the numbers about slow kernels that hold for the whole run, by the names of the rules."""
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    loops = [group for group in groups if group.get("foreach") is False and not group.get("fused")]
    found = {"looping_groups": len(loops), "fused_optimizer": any("fused" in group for group in loops)}
    if device.type == "cuda" and precision == "fp32":
        found["without_tf32"] = torch.cuda.get_device_capability(device) >= AMPERE
    return {f"kernel/{name}": float(number) for name, number in found.items()}


def searches_for_nothing(model: Any) -> float:
    """Return 1 if DDP searches for unused parameters and finds none. Python can't catch DDP's own warning."""
    if not isinstance(model, DistributedDataParallel) or not model.find_unused_parameters:
        return 0.0
    return float(model._get_ddp_logging_data().get("unused_parameter_size", 1) == 0)


def graph_breaks() -> float:
    dynamo: Any = sys.modules.get("torch._dynamo")
    return float(len(dynamo.utils.counters["graph_break"])) if dynamo else 0.0
