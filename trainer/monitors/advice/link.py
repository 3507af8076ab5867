"""Reads the speed of a PCIe link from /sys."""

import re
from pathlib import Path

PCI = Path("/sys/bus/pci/devices")
# Payload of one lane in MiB/s, each way, by gigatransfers per second: 8b/10b up to 5, then 128b/130b; PAM4 from 64 on.
CODED = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 242 / 256}


def speed(device: Path) -> float:
    """Return a PCIe link's payload rate in MiB/s, each way; 0 if unknown.

    An idle GPU slows its link down, so the maximum speed counts; the width is that of the slot.
    """
    try:
        rate = re.match(r"[\d.]+", (device / "max_link_speed").read_text())
        lanes = int((device / "current_link_width").read_text())
    except (OSError, ValueError):
        return 0.0
    transfers = float(rate[0]) if rate else 0.0
    return transfers * CODED.get(transfers, 0.0) * 1e9 / 8 * lanes / (1 << 20)
