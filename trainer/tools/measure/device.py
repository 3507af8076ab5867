"""Measures copies between host and device, and the peak of matrix products."""

import time
from collections.abc import Callable
from typing import Any

import torch

from trainer.parallel.warmup import wait

ROUNDS = 5  # a rate is that of the fastest: other work can only slow a round down
COPY_BYTES = 64 << 20
GPU_SIZE, CPU_SIZE = 8192, 1024  # rows and columns of a matrix
BUDGET = 0.2  # of a round
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def copies(device: torch.device) -> dict[str, float]:
    """Return bytes/s from host to device and back, for pinned and pageable memory; empty on a CPU."""
    if device.type != "cuda":
        return {}
    rates: dict[str, float] = {}
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    for kind in ("pinned", "pageable"):
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=kind == "pinned")
        for name, target, source in (("to_device", there, here), ("to_host", here, there)):
            seconds = fastest(lambda target=target, source=source: target.copy_(source, non_blocking=True), device)
            rates[f"{kind}_{name}_bytes_per_s"] = COPY_BYTES / seconds
    return rates


def matmul(device: torch.device) -> dict[str, float]:
    """Return FLOP/s of square matrix products by dtype, without dtypes that the device lacks."""
    n = GPU_SIZE if device.type == "cuda" else CPU_SIZE
    rates: dict[str, float] = {}
    for name, dtype in {**DTYPES, **({"tf32": torch.float32} if device.type == "cuda" else {})}.items():
        precision = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            rates[f"{name}_flop_per_s"] = 2 * n**3 / fastest(lambda a=a, b=b: a @ b, device)
        except RuntimeError:  # not implemented for this dtype
            continue
        finally:
            torch.set_float32_matmul_precision(precision)
    return rates


def fastest(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds per call, in the fastest of several rounds."""

    def run(calls: int) -> float:
        wait(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        wait(device)
        return (time.perf_counter() - began) / calls

    run(1)
    calls = max(1, int(BUDGET / run(1)))
    return min(run(calls) for _ in range(ROUNDS if calls > 1 else 2))
