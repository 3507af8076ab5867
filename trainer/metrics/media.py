"""Media for loggers: texts, images, and values for histograms, distinguished by type and shape."""

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.checks.recipe import describe
from trainer.errors import ConfigError, printable

BINS = 64
COLOURS = {1: 0, 3: 2, 4: 6}  # channels -> PNG's colour type


class Image(NamedTuple):
    png: bytes
    height: int
    width: int
    channels: int


class Histogram(NamedTuple):
    """Finite values in bins of equal width. `edges` has one number more than `counts`."""

    counts: list[int]
    edges: list[float]
    total: float
    squares: float  # the sum of the squared values


def check_media(media: Any, source: str = "on_media") -> Mapping[str, str | Tensor]:
    """Return `media`: name -> text or tensor. (C, H, W) with C of 1, 3 or 4 is an image; (N,) are values.

    `source` names the method that returned the media, for messages.
    """
    if not isinstance(media, Mapping):
        raise ConfigError(f"{source}: returned a value of type {type(media).__name__}; return a dict of name -> media")
    for name, value in media.items():
        if isinstance(value, str) or (isinstance(value, Tensor) and (value.ndim == 1 or is_image(value))):
            continue
        raise ConfigError(
            f"{source}: {printable(repr(name))} is {describe(value)}; give a str, an image (C, H, W) with 1, 3 or 4 "
            "channels, or values (N,) for a histogram"
        )
    return media


def prepared(media: Mapping[str, Any]) -> Iterator[tuple[str, str | Image | Histogram]]:
    """Yield the media as loggers write them. Waits for the device."""
    for name, value in check_media(media).items():
        if isinstance(value, Tensor):
            yield str(name), to_image(value) if is_image(value) else to_histogram(value)
        else:
            yield str(name), value


def is_image(value: Tensor) -> bool:
    return value.ndim == 3 and value.shape[0] in COLOURS and value.numel() > 0


def to_image(pixels: Tensor) -> Image:
    """Convert pixels (C, H, W), uint8 or floats from 0 to 1, to a PNG. NaN becomes black."""
    if pixels.is_floating_point():
        pixels = pixels.float().nan_to_num(0.0).clamp(0, 1).mul(255).round()
    array = pixels.detach().to("cpu", torch.uint8).permute(1, 2, 0).numpy()  # (H, W, C)
    height, width, channels = array.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), array.reshape(height, -1)], axis=1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        png += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return Image(png, height, width, channels)


def to_histogram(values: Tensor) -> Histogram:
    """Count the finite values of a tensor (N,)."""
    array = values.detach().to("cpu", torch.float64).numpy()
    array = array[np.isfinite(array)]
    counts, edges = np.histogram(array, BINS)
    return Histogram(counts.tolist(), edges.tolist(), float(array.sum()), float(array @ array))
