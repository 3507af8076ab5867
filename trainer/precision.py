"""One setting for number formats: the autocast region and the loss scaler that follow from it."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainer.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """`fp32`, `tf32` (Ampere and later: 10-bit mantissa in float32 matrix products), `bf16` or `fp16` autocast.

    `auto` is bf16 where the GPU computes in it, else fp16; on a CPU fp32. fp16 comes with dynamic loss scaling
    (Micikevicius et al. 2018, arXiv:1710.03740); elsewhere the scaler is disabled and every call to it is a no-op.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        cuda = device.type == "cuda"
        if name == "auto":
            name = ("bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16") if cuda else "fp32"
        if name == "tf32" and not (cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
            raise ConfigError(f"trainer.precision=tf32: {device} has no TF32; use trainer.precision=auto")
        self.name = name
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        # Entered on every micro-batch: a null context costs 0.3 us, a disabled autocast 2.6 us.
        self.autocast: AbstractContextManager[Any] = (
            torch.autocast(device.type, DTYPES[name]) if name in DTYPES else nullcontext()
        )
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = name == "tf32"
