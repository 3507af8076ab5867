"""How a reader wants to see metrics: sections, titles and units."""

from typing import NamedTuple

# How numbers of a chart are shown; format.js knows the kinds.
KINDS = ("plain", "rate", "share", "seconds", "GiB", "MiB", "MiB/s", "W", "C", "MHz", "count")


class Shown(NamedTuple):
    section: str
    title: str
    kind: str  # of `KINDS`
    zero: bool  # whether the axis begins at zero


SECTIONS = {
    "loss": "Training and validation",
    "perf": "Throughput",
    "time": "Where the time of a step goes",
    "memory": "Memory",
    "comm": "Communication",
    "host": "Devices and hosts",
    "other": "Other metrics",
}

TITLES = {
    "train/loss": "Training loss",
    "val/loss": "Validation loss",
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm",
    "train/loss_scale": "Loss scale",
    "train/left_out": "Steps left out",
    "perf/samples_per_s": "Samples per second",
    "perf/tokens_per_s": "Tokens per second",
    "perf/mfu": "Model FLOP utilisation",
    "perf/peak_memory_gib": "Peak memory of the fullest GPU",
    "perf/peak_rss_gib": "Peak resident memory of the fullest rank",
    "time/spread": "Spread between ranks",
    "time/data_max": "Longest wait for data of a rank",
    "time/communication_min": "Shortest communication of a rank",
    "time/slowest_rank": "Slowest rank",
    "comm/mib_per_step": "Sent per step",
    "comm/seconds_per_step": "Communication per step",
    "comm/busbw_mib_s": "Bus bandwidth",
    "gpu/utilisation": "GPU utilisation",
    "gpu/utilisation_min": "Least GPU utilisation of a rank",
    "gpu/idlest_rank": "Rank with the least GPU utilisation",
    "gpu/utilisation_spread": "Swing of GPU utilisation",
    "gpu/memory_gib": "GPU memory in use",
    "gpu/power_w": "GPU power",
    "gpu/temperature_c": "GPU temperature",
    "gpu/sm_mhz": "GPU clock",
    "gpu/memory_mhz": "Clock of the GPU's memory",
    "gpu/throttled": "GPU throttled, share of samples",
    "gpu/pcie_rx_mib_s": "PCIe received",
    "gpu/pcie_tx_mib_s": "PCIe sent",
    "gpu/nvlink_mib_s": "NVLink",
    "host/cpu": "CPU, share of all cores",
    "host/ram_gib": "Host memory in use",
    "host/disk_read_mib_s": "Disk read",
    "host/disk_write_mib_s": "Disk written",
    "host/network_rx_mib_s": "Network received",
    "host/network_tx_mib_s": "Network sent",
}
ENDINGS = {
    "_gib": "GiB", "_mib_s": "MiB/s", "mib_per_step": "MiB", "_w": "W", "_c": "C", "_mhz": "MHz", "_per_s": "rate",
    "seconds_per_step": "seconds", "_seconds": "seconds", "_rank": "count", "left_out": "count",
}  # fmt: skip
SHARES = {"gpu/utilisation", "gpu/utilisation_min", "gpu/utilisation_spread", "gpu/throttled"}
SHARES |= {"host/cpu", "perf/mfu", "time/spread"}
MEMORY = {"perf/peak_memory_gib", "perf/peak_rss_gib", "gpu/memory_gib", "host/ram_gib"}
GROUPS = {"train": "loss", "val": "loss", "perf": "perf", "time": "time", "comm": "comm", "gpu": "host", "host": "host"}


def shown(name: str) -> Shown:
    """Return how to show a metric. An unknown name is shown as it is."""
    group = name.partition("/")[0]
    section = "memory" if name in MEMORY else GROUPS.get(group, "other")
    kind = next((kind for end, kind in ENDINGS.items() if name.endswith(end) and section not in ("loss", "other")), "")
    if name in SHARES:
        kind = "share"
    elif name == "train/left_out":
        kind = "count"
    elif group == "time" and not kind:
        kind = "seconds"
    zero = section not in ("loss", "other")
    return Shown(section, TITLES.get(name, name), kind or "plain", zero)
