"""One setting for number formats: the autocast region and the loss scaler that follow from it; one for their bits."""

import os
from collections.abc import Callable
from typing import Any

import torch

from trainer.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """`fp32`, `tf32` (Ampere and later: 10-bit mantissa in float32 matrix products), `bf16` or `fp16` autocast.

    `auto` is bf16 where the GPU computes in it, else fp16; on a CPU fp32. fp16 comes with dynamic loss scaling
    (Micikevicius et al. 2018, arXiv:1710.03740); elsewhere the scaler is disabled and every call to it is a no-op.
    `deterministic`: a GPU's kernels that give the same bits every time; torch raises where an operation has none.
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
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
            torch.use_deterministic_algorithms(True)  # which loads Inductor, and that reads its variable
            torch.backends.cudnn.benchmark = False  # it would choose kernels by their time

    def cast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` under autocast. In float32 it is `function` itself: a null context takes 2 us of a small step."""
        return torch.autocast(self.device.type, DTYPES[self.name])(function) if self.name in DTYPES else function
