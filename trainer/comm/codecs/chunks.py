"""Cuts work into chunks that fit a core's cache, so that temporaries cost no memory traffic and no page faults."""

from collections.abc import Iterator

import torch

CHUNK = 1 << 17  # elements; a multiple of 8, so that packed bits are whole bytes


def chunks(count: int, device: torch.device, unit: int = 1) -> Iterator[slice]:
    """Yield slices of `count` items of `unit` elements each; on a GPU one slice, because launches cost more."""
    step = max(CHUNK // unit, 1) if device.type == "cpu" else max(count, 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
