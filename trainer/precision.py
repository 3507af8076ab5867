"""Number formats: the autocast region and the loss scaler that follow from one setting, and deterministic kernels."""

import os
from collections.abc import Callable
from typing import Any

import torch

from trainer.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The number formats of a run: `fp32`, `tf32`, or `bf16` and `fp16` autocast.

    `auto` is bf16 on a GPU that computes in it, fp16 on other GPUs, and fp32 on a CPU. With `tf32`, on Ampere or later,
    float32 matrix products have a 10-bit mantissa. With `fp16`, loss scaling is dynamic (Micikevicius et al. 2018,
    arXiv:1710.03740). With other formats the scaler is disabled, and every call to it is a no-op.

    `torch.backends.cudnn.benchmark` is the recipe's to set, since its search runs again for each new shape of a batch.

    Args:
        deterministic: Use kernels that give the same bits every time. If an operation has no such kernel, torch raises.
    """

    def __init__(self, name: str, device: torch.device, deterministic: bool = False) -> None:
        cuda = device.type == "cuda"
        if name == "auto":
            name = ("bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16") if cuda else "fp32"
        if name == "tf32" and not (cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
            raise ConfigError(f"trainer.precision=tf32: {device} has no TF32; use trainer.precision=auto")
        self.name, self.device = name, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
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
            torch.use_deterministic_algorithms(True)  # loads Inductor, which reads its variable
            # Else each torch.empty is filled with NaN: a write of all memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
            torch.backends.cudnn.benchmark = False  # it would choose kernels by their time

    def cast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` under autocast; in float32 `function` itself: a null context takes 2 us of a small step."""
        return torch.autocast(self.device.type, DTYPES[self.name])(function) if self.name in DTYPES else function


def used_cuda() -> bool:
    """Return whether this process has allocated memory on a GPU, as all code that calls cuBLAS must."""
    stats = map(torch.cuda.memory_stats, range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0))
    return any(each.get("allocation.all.allocated") for each in stats)
