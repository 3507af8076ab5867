"""The key `tuned` in a result of `trainer.tools.tune`: the machine on which it was measured."""

import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tuned:
    cpu: str  # model
    gpu: str | None  # model; null without one
    ranks: int
    ranks_per_node: int
    link: str  # class of the slowest link between ranks, as "1 Gbit/s"; shown, and not compared


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def gpu_models(driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the models of this machine's NVIDIA GPUs without initialising them; empty if unknown."""
    try:
        lines = [line for file in sorted(driver.glob("*/information")) for line in file.read_text().splitlines()]
    except OSError:  # a container may hide them
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def differences(tuned: Mapping[str, Any], here: Tuned) -> str:
    """Describe in one line how this machine differs from the result's; empty if it does not."""
    found = [
        f"{key} {tuned[key]} there, {value} here"
        for key, value in dataclasses.asdict(here).items()
        if key != "link" and tuned[key] != value
    ]
    return "; ".join(found)
