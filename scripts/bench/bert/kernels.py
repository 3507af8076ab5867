"""Says on which kinds of kernels a step spends the device's time."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
# Kind -> pattern of the names of its kernels, or of its operations on a CPU. The first that matches counts.
KINDS = {
    "attention": r"flash|fmha|attention|sdpa",
    "optimizer": r"multi_tensor|adam|foreach",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|mm\b|linear",
    "norms and softmax": r"norm|softmax",
    "copies and casts": r"memcpy|memset|copy|_to_copy",
    "fused by Inductor": r"triton",
    "elementwise and reductions": r"elementwise|reduce|aten::|vectorized|dropout|gelu|embedding|index|gather|scatter",
}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "others")


class Kernels:
    """Profiles some steps: call `tick` at the end of each step, beginning with the one before them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        activity = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        self.profile, self.ticks = profile(activities=[activity]), 0
        self.ms: dict[str, float] = {}  # of a step, by kind

    def tick(self) -> None:
        if self.ticks == 0:
            self.profile.start()
        elif self.ticks == STEPS:
            self.profile.stop()
            self._sum()
        self.ticks += 1

    def _sum(self) -> None:
        own: Callable[[Any], float] = (
            (lambda e: e.self_device_time_total) if self.cuda else lambda e: e.self_cpu_time_total
        )
        for event in self.profile.key_averages():
            if own(event):
                kind = kind_of(event.key)
                self.ms[kind] = self.ms.get(kind, 0.0) + own(event) / 1000 / STEPS
