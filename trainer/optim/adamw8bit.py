"""AdamW with 8-bit moments, from bitsandbytes (Dettmers et al. 2021, arXiv:2110.02861)."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.optim.groups import refuse_rows


@contextmanager
def no_downloads() -> Iterator[None]:
    """Hide the package `kernels`: with it, importing bitsandbytes downloads a kernel for 4-bit inference, or warns."""
    loaded = sys.modules.get("kernels")
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    sys.modules["kernels"], logger.disabled = None, True  # pyright: ignore[reportArgumentType] None: can't be imported
    try:
        yield
    finally:
        logger.disabled = False
        del sys.modules["kernels"]
        if loaded:
            sys.modules["kernels"] = loaded


with no_downloads():
    import bitsandbytes

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


class AdamW8bit(bitsandbytes.optim.AdamW8bit):
    """AdamW with 8-bit moments in blocks of 256, each with its own scale. Memory: 2.03 bytes per element instead of
    AdamW's 8.

    Parameters with fewer than `min_8bit_size` elements have float32 moments. All parameters share the two lookup tables
    of 256 values, also after a resume, so a checkpoint stores each table once.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        refuse_rows(self, "adamw8bit", "its blocks of 256 values are of whole parameters")
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.dtype not in NUMBERS:
                raise ConfigError(
                    f"optimizer=adamw8bit: takes parameters of float32, bfloat16 and float16, not {p.dtype}; "
                    "use optimizer=adamw"
                )
            if not p.is_contiguous():  # bitsandbytes would change the format in the first step, and a resume's bits
                raise ConfigError(
                    f"optimizer=adamw8bit: a parameter of shape {tuple(p.shape)} is in another memory format; give "
                    "the model memory_format=torch.contiguous_format, or use optimizer=adamw"
                )

    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        state = self.state[p]
        for key, name in (("qmap1", "dynamic"), ("qmap2", "udynamic")):
            if key in state and state[key] is not self.name2qmap[name]:  # after a resume
                table = self.name2qmap[name] = self.name2qmap[name].to(p.device)
                if not torch.equal(state[key], table):
                    raise ConfigError(
                        f"trainer.resume: the checkpoint's 8-bit values have another table ({key}) than bitsandbytes "
                        f"{bitsandbytes.__version__}; install the version that wrote it"
                    )
                state[key] = table
        super().update_step(group, p, gindex, pindex)
