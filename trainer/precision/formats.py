"""Number formats: autocast and loss scaling, which follow from one setting, and deterministic kernels."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from trainer.annotated import called
from trainer.errors import ConfigError
from trainer.precision.fp8 import compute_in_fp8, refuse_without_fp8
from trainer.precision.rounding import round_steps, store_in_bf16

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}  # of autocast


class Precision:
    """The number formats of a run: `fp32`, `tf32`, `bf16` and `fp16` autocast, `fp8`, or `bf16_params`.

    With `fp16`, loss scaling is dynamic (Micikevicius et al. 2018, arXiv:1710.03740); otherwise the scaler is disabled.
    `bf16_params` computes the whole model in bf16 without autocast, which would run LayerNorm in float32. Modules read
    bf16 copies of float32 master weights, and only parameters, inputs and outputs are cast. Without `master_weights`,
    parameters and gradients are bf16 only, and steps round stochastically.

    `auto` is bf16 on GPUs that compute in it, fp16 on other GPUs, and fp32 on CPUs. Weights and gradients are float32,
    so ranks with different formats train together. If any rank uses fp16, all ranks scale their losses. A sum over
    ranks contains any rank's overflow, so all ranks skip the step.

    The recipe may set `torch.backends.cudnn.benchmark`, whose search runs again for each batch shape.

    Args:
        deterministic: Use kernels that always give the same bits. torch raises if an operation has none.
        each: Gathers a value from all ranks, on every rank.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        deterministic: bool = False,
        each: Callable[[Any], list[Any]] = lambda value: [value],
        master_weights: bool = True,
    ) -> None:
        cuda, setting = device.type == "cuda", name
        if name == "auto":
            name = fastest(device)
        if name == "tf32" and not (cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
            raise ConfigError(f"trainer.precision=tf32: {device} has no TF32; use trainer.precision=auto")
        if not master_weights and name != "bf16_params":
            raise ConfigError(
                f"trainer.master_weights=false: precision={setting} stores weights in float32, and computes from them; "
                "set trainer.precision=bf16_params, or trainer.master_weights=true"
            )
        self.master_weights = master_weights
        if name == "fp8":
            refuse_without_fp8(device)
        self.name, self.device = name, device
        self.label = agree(setting, name, each)
        self.scaler = torch.amp.GradScaler(device.type, enabled="fp16" in self.label)
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"
        if deterministic and cuda:
            if "CUBLAS_WORKSPACE_CONFIG" not in os.environ and used_cuda():
                raise ConfigError(
                    "trainer.deterministic=true: this process has used CUDA before, and cuBLAS reads its settings "
                    "once; start the process with CUBLAS_WORKSPACE_CONFIG=:4096:8 in its environment"
                )
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
            torch.use_deterministic_algorithms(True)  # loads Inductor, which reads the variable above
            # Otherwise each torch.empty is filled with NaN, which writes all of its memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
            torch.backends.cudnn.benchmark = False  # it would choose kernels by their time

    def __repr__(self) -> str:
        return called(self, "name", "label", "master_weights")

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model, prepared for `bf16_params` or `fp8`. Raise ConfigError if that is impossible."""
        if self.name == "fp8":
            return compute_in_fp8(model)
        if not self.master_weights:
            store_in_bf16(model)
        if self.name == "bf16_params":
            compute_in_bf16(model)
        return model

    @contextmanager
    def converted(self, model: nn.Module) -> Iterator[None]:
        """Let the model compute as after `convert`, until the context ends."""
        kinds = [(module, type(module)) for module in model.modules()]
        handles = compute_in_bf16(model) if self.name == "bf16_params" else []
        try:
            yield
        finally:
            for module, kind in kinds:
                module.__class__ = kind
            for handle in handles:
                handle.remove()

    def wrap_optimizer(self, optimizer: Optimizer, module: nn.Module, seed: int, step: Callable[[], int]) -> Optimizer:
        return optimizer if self.master_weights else round_steps(optimizer, module, seed, step)

    def cast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` under autocast. Without autocast return it unchanged, because a null context costs 2 us per
        step.
        """
        return torch.autocast(self.device.type, DTYPES[self.name])(function) if self.name in DTYPES else function


def fastest(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def agree(setting: str, name: str, each: Callable[[Any], list[Any]]) -> str:
    """Return the formats of all ranks, such as `bf16` or `2 x bf16, 1 x fp32`, and check that all settings agree. A
    collective.
    """
    rows = each([setting, name])
    for rank, (other, _) in enumerate(rows):
        if other != rows[0][0]:
            raise ConfigError(
                f"trainer.precision is {rows[0][0]} on rank 0 and {other} on rank {rank}; start all ranks with "
                "the same arguments, or give trainer.precision=auto, which each rank resolves for its device"
            )
    parts = [(kind, len(list(group))) for kind, group in groupby(name for _, name in rows)]
    return parts[0][0] if len(parts) == 1 else ", ".join(f"{count} x {kind}" for kind, count in parts)


def used_cuda() -> bool:
    """Return whether this process has allocated GPU memory, as any call of cuBLAS does."""
    stats = map(torch.cuda.memory_stats, range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0))
    return any(each.get("allocation.all.allocated") for each in stats)


def compute_in_bf16(model: nn.Module) -> list[RemovableHandle]:
    """Make modules read float32 parameters as bf16, cast float inputs of the model to bf16 and its outputs to float32.

    Return the handles of the hooks that cast. The parameters' names, dtypes and gradients do not change. Gradients are
    computed in bf16 and accumulated in float32. Batch norm keeps float32 parameters and statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise ConfigError(
                f"trainer.precision=bf16_params: {name} is a {type(module).__name__}, which keeps a list of its "
                "parameters; use trainer.precision=bf16"
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue  # takes bf16 inputs, but only parameters of the type of its statistics
        names = tuple(key for key, p in module._parameters.items() if p is not None and p.dtype == torch.float32)
        if names:
            module.__class__ = reads_bf16(type(module), names)
    before = model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
    return [before, model.register_forward_hook(_cast_outputs)]


@cache
def reads_bf16(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of the same name whose attributes `names` are bf16 copies of the parameters."""

    def reader(name: str) -> property:
        return property(lambda self: self._parameters[name].to(torch.bfloat16))

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: reader(name) for name in names}})


def _cast_inputs(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(lambda value: _cast(value, torch.float32, torch.bfloat16), (args, kwargs))


def _cast_outputs(model: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(lambda value: _cast(value, torch.bfloat16, torch.float32), output)


def _cast(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    return value.to(wanted) if isinstance(value, Tensor) and value.dtype == given else value
