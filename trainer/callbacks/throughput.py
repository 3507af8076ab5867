"""Adds speed to the numbers: samples and tokens per second, and model FLOP utilisation where the peak is known."""

import time

import torch

from trainer.callback import Callback, Role

# Dense bf16 FLOP/s of one device, from the makers' data sheets.
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165.2e12}


class Throughput(Callback):
    """Over the steps since the last log line; validation and checkpoints in between count as time.

    Args:
        peak_tflops: Of one device, for perf/mfu (Chowdhery et al. 2022, arXiv:2204.02311); null: by its name.
    """

    role = Role.MEASURE

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops

    def on_fit_start(self, trainer) -> None:
        name = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu"
        by_name = next((flops for device, flops in PEAKS.items() if device in name), None)
        self.peak = by_name if self.peak_tflops is None else self.peak_tflops * 1e12
        self.samples, self.time = trainer.samples, time.perf_counter()

    def on_step_end(self, trainer) -> None:
        if not trainer.metrics:
            return
        now = time.perf_counter()
        rate = (trainer.samples - self.samples) / (now - self.time)
        self.samples, self.time = trainer.samples, now
        trainer.metrics["perf/samples_per_s"] = rate
        tokens = getattr(trainer.recipe, "tokens_per_sample", None)
        flops = getattr(trainer.recipe, "flops_per_sample", None)
        if tokens is not None:
            trainer.metrics["perf/tokens_per_s"] = rate * tokens
        if flops is not None and self.peak is not None:
            trainer.metrics["perf/mfu"] = rate * flops / (trainer.world * self.peak)
