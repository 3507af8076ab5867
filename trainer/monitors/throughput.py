"""Adds speed to the metrics: samples and tokens per second, and MFU (model FLOP utilisation) if the peak is known."""

import time

import torch

from trainer.callback import Callback, Role, only_logged

# Dense TFLOP/s of one device in bf16 and fp16, tf32, and fp32, from NVIDIA's data sheets.
A100, H100 = (312.0, 156.0, 19.5), (989.4, 494.7, 66.9)
PEAKS = {  # by torch's full name of the device: boards with one chip differ
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA H100 PCIe": (756.0, 378.0, 51.0),
    "NVIDIA H100 NVL": (835.0, 417.5, 60.0),
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H200": H100,
    "NVIDIA H200 NVL": (835.5, 417.5, 60.0),
    "NVIDIA GH200 480GB": H100,
    "NVIDIA L40S": (362.0, 183.0, 91.6),
}

COLUMN = {"bf16": 0, "bf16_params": 0, "fp16": 0, "fp8": 0, "tf32": 1, "fp32": 2}


class Throughput(Callback):
    """Speed over the steps since the last logged one, including validations and checkpoints between them.

    Args:
        peak_tflops: Peak of one device, for perf/mfu (Chowdhery et al. 2022, arXiv:2204.02311). If null, it is taken
            from `PEAKS` by the device's name and the run's precision; other devices have no perf/mfu.
    """

    role = Role.MEASURE

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops

    def on_fit_start(self, trainer) -> None:
        self.peak = self.peak_tflops
        if self.peak is None and trainer.device.type == "cuda":
            known = PEAKS.get(torch.cuda.get_device_name(trainer.device))
            self.peak = known and known[COLUMN[trainer.precision.name]]
        self.samples, self.time = trainer.samples, time.perf_counter()

    @only_logged
    def on_step_end(self, trainer) -> None:
        now = time.perf_counter()
        rate = (trainer.samples - self.samples) / (now - self.time)
        self.samples, self.time = trainer.samples, now
        trainer.metrics["perf/samples_per_s"] = rate
        tokens = getattr(trainer.recipe, "tokens_per_sample", None)
        flops = getattr(trainer.recipe, "flops_per_sample", None)
        if tokens is not None:
            trainer.metrics["perf/tokens_per_s"] = rate * tokens
        if flops is not None and self.peak is not None:
            trainer.metrics["perf/mfu"] = rate * flops / (trainer.world * self.peak * 1e12)
