"""Machines of any number of nodes: presets from data sheets, and the JSON of `echelon bench`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.cost.machine import Link, Machine, from_json
from trainer.errors import ConfigError, nearest

# NCCL's own model of a ring with protocol Simple: seconds a hop over NVLink and over a network (src/graph/tuning.cc).
NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14.0e-6
DISK = 2e9  # bytes a second of a node; a choice, for storage differs from site to site
GPU_CORES = 8.0  # of the host, for each GPU; more than communication takes


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `machine` is one node; `across` is a rank's share of the network."""

    machine: Machine
    tflops: dict[str, float]  # dense peak of a device, by precision; empty: unknown
    memory_bytes_per_s: float  # of a device's memory, for the optimizer's step; 0: unknown
    host_bytes_per_s: float  # from a device to its host, for the copy of a checkpoint
    source: str
    auto: str = "bf16"  # what trainer.precision=auto computes in there
    unknown: tuple[str, ...] = ()  # a line for each thing that was not measured

    def of(self, nodes: int) -> Machine:
        return replace(self.machine, ranks=nodes * self.machine.ranks_per_node)


def gpus(nvlink: float, network: float, memory: float) -> Machine:
    """Return a node of eight GPUs. `nvlink` and `network` are bytes/s per GPU, each way; `memory` is bytes per GPU."""
    inside, across = Link(NVLINK_LATENCY, nvlink, 0.0), Link(NETWORK_LATENCY, network, 0.0)
    return Machine(8, 8, GPU_CORES, inside, across, {}, memory, DISK)


# NVLink is half of the data sheet's figure, which counts both ways. PCIe: 16 lanes, one way.
PRESETS = {
    "8xh100-8x400g": Cluster(
        gpus(450e9, 50e9, 80e9), {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
        3.35e12, 64e9,
        "NVIDIA H100 SXM data sheet: NVLink 900 GB/s both ways, HBM3 3.35 TB/s, PCIe 5; a 400 Gbit/s card for each GPU",
    ),
    "8xa100-8x200g": Cluster(
        gpus(300e9, 25e9, 80e9), {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}, 2.039e12, 32e9,
        "NVIDIA A100 80GB SXM data sheet: NVLink 600 GB/s both ways, HBM2e 2.039 TB/s, PCIe 4; 200 Gbit/s for each GPU",
    ),
    "8xv100-1x100g": Cluster(
        gpus(150e9, 12.5e9 / 8, 16e9), {"fp32": 15.7, "fp16": 125.0}, 0.9e12, 16e9,
        "NVIDIA V100 SXM2 data sheet: NVLink 300 GB/s both ways, HBM2 900 GB/s, PCIe 3; 100 Gbit/s for the node",
        auto="fp16",
    ),
}  # fmt: skip


def find(name: str) -> Cluster:
    """Return a preset, or the machine in a JSON file of the bench."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"machine={name}: is no file and no preset; {nearest(name, PRESETS)}")
    try:
        found = json.loads(path.read_text())
        if found["machine"] is not None:
            return measured(from_json(found["machine"]), found, path.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"is no file of echelon bench ({type(error).__name__}: {error})"
        raise ConfigError(f"machine={name}: {why}; give one") from None
    raise ConfigError(f"machine={name}: is of some parts alone; run echelon bench without --only, --collectives")


def measured(machine: Machine, found: Mapping[str, Any], file: str) -> Cluster:
    end = "_flop_per_s"
    tflops = {name.removesuffix(end): rate / 1e12 for name, rate in found.get("matmul", {}).items()}
    auto = str(found.get("auto_precision") or likely_auto(tflops))
    host = found.get("copies", {}).get("pinned_to_host_bytes_per_s")
    unknown: list[str] = []
    if not host:
        unknown.append("checkpoints: copies to the host were not measured; the rate of the link inside is taken")
    if math.isinf(machine.across.bytes_per_s):
        alone = math.isinf(machine.inside.bytes_per_s)
        taken = "communication takes no time" if alone else "between nodes the link inside is taken"
        unknown.append(f"links: {'one rank' if alone else 'one node'} was measured, so {taken}")
        machine = replace(machine, across=machine.inside)
    return Cluster(machine, tflops, 0.0, host or machine.inside.bytes_per_s, f"measured: {file}", auto, tuple(unknown))


def likely_auto(tflops: Mapping[str, float]) -> str:
    """Return the precision that `auto` would choose, for files that lack it. Only GPUs' files have TF32."""
    if tflops and "tf32" not in tflops:
        return "fp32"
    return "fp16" if tflops.get("fp16", 0.0) > 2 * tflops.get("bf16", math.inf) else "bf16"  # a V100 emulates bf16
