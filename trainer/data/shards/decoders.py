"""Decodes the bytes of a member by its extension, as WebDataset does.

No content can run code, or take much more memory than its size.
"""

import ast
import io
import json
import math
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load

from trainer.errors import DataError, UnavailableError

PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
FORMATS = ("JPEG", "PNG", "WEBP", "PPM")  # others are refused because Pillow runs a program for some formats
PIXELS = 1 << 26  # pixels that any image may have
PIXELS_PER_BYTE = 100  # limit of a larger image
LONGEST_HEADER = 10_000  # bytes; NumPy's limit
UNPACKED = 64 << 20  # bytes that the arrays of any npz may have
UNPACKED_PER_BYTE = 20  # limit of a larger npz


def decode(extension: str, content: bytes, decoders: Sequence[Callable[[str, bytes], Any]] = ()) -> Any:
    """Decode a member by the first of a user's `decoders` that returns a value, else by its last extension.

    A member whose extension is not in `DECODERS` stays bytes. As in WebDataset, a user's decoder may return a
    `Continue` with another extension and content for the decoders after it.
    """
    continued = getattr(sys.modules.get("webdataset.autodecode"), "Continue", ())
    refuse_pickled(extension)
    for decoder in decoders:
        value = decoder(f".{extension}", content)
        if isinstance(value, continued):
            extension, content = value.key.removeprefix("."), value.data
            refuse_pickled(extension)
        elif value is not None:
            return value
    own = DECODERS.get(extension.rpartition(".")[2])
    return own(content) if own else content


def refuse_pickled(extension: str) -> None:
    if extension.lower().rpartition(".")[2] in PICKLED:
        raise ValueError("unpickling can run any code: use npy, safetensors or json")


def undecodable(error: Exception, place: object, fix: str = "write it again or remove it") -> Exception:
    """Return the DataError or UnavailableError to raise for any `error` of a decoder or of a read."""
    if isinstance(error, OSError) and error.errno:  # a system error; those of Pillow and nibabel have no number
        return UnavailableError(f"{place}: {error}; fix the cause, then resume")
    return DataError(f"{place}: can't be decoded ({error}); {fix}")


class Deferred:
    """A member whose decoder has left it compressed. A DataError of its later decoding begins with `place`."""

    place = ""


def image_of_bytes(content: bytes, scale: int = 1) -> Any:
    """Decode an image to RGB by Pillow.

    Args:
        scale: 2, 4 or 8 divides the width and height of a JPEG.
    """
    from PIL import Image  # imported here, since data without images needs no Pillow

    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        if image.width * image.height > max(PIXELS, PIXELS_PER_BYTE * len(content)):
            raise ValueError(f"{image.width} x {image.height} pixels in {len(content)} bytes")
        if scale > 1:
            image.draft("RGB", (image.width // scale, image.height // scale))
        return image.convert("RGB")


def _npy(content: bytes) -> Any:
    head = content[: 10 + int.from_bytes(content[8:10], "little")]
    if (layout := _layout(head)) is None:
        _refuse_larger(content)
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    shape, order, dtype, count = layout
    return np.frombuffer(content, dtype, count, len(head)).reshape(shape, order=order).copy(order="K")


@lru_cache(64)
def _layout(head: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any], int] | None:
    """Parse a header of npy version 1; None for an array that NumPy itself must read.

    NumPy parses the header as Python, which takes ten times as long as the rest. The cache helps because most samples
    of a shard have the same header.
    """
    if head[:8] != b"\x93NUMPY\x01\x00":
        return None
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(head[8:]))
    if dtype.hasobject or not dtype.itemsize or min(shape, default=1) < 1:
        return None
    return shape, "F" if fortran else "C", dtype, math.prod(shape)


def _refuse_larger(content: bytes) -> None:
    """Refuse an array whose header claims more bytes than there are, because NumPy would allocate them first."""
    start = 10 if content[6:7] == b"\x01" else 12
    length = int.from_bytes(content[8:start], "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"the array's header has {length} bytes")
    header = ast.literal_eval(content[start : start + length].decode("latin1").strip())
    size = math.prod(header["shape"]) * np.lib.format.descr_to_dtype(header["descr"]).itemsize
    if size > len(content):
        raise ValueError(f"the array claims {size} bytes, and there are {len(content)}")


def _npz(content: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        most = max(UNPACKED, UNPACKED_PER_BYTE * len(content))
        if (size := sum(member.file_size for member in file.infolist())) > most:
            raise ValueError(f"the arrays have {size} bytes, and at most {most} are read of {len(content)} packed ones")
        return {name.removesuffix(".npy"): _npy(file.read(name)) for name in file.namelist()}


def _tenbin(content: bytes) -> list[Any]:
    """Decode WebDataset's arrays: chunks alternating between an int64 header (dtype, name, shape) and array bytes."""
    chunks: list[bytes] = []
    at = 0
    while at < len(content):
        size = int.from_bytes(content[at + 8 : at + 16], "little", signed=True)
        if content[at : at + 8] != b"~TenBin~" or not 0 <= size <= len(content) - at - 16:
            raise ValueError(f"there is no tensor at byte {at}")
        chunks.append(content[at + 16 : at + 16 + size])
        at += 16 + -(-size // 64) * 64
    arrays: list[Any] = []
    for header, values in zip(chunks[::2], chunks[1::2], strict=True):
        kind, _, dimensions, *shape = np.frombuffer(header, np.int64).tolist()
        name = kind.to_bytes(8, "little").rstrip(b"\0").decode("ascii")
        if name not in TENBIN or len(shape) != dimensions:
            raise ValueError(f"{header!r} is not a tensor's header")
        arrays.append(np.frombuffer(values, name, math.prod(shape)).reshape(shape).copy())
    return arrays


TENBIN = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")

DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "ppm"), image_of_bytes),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx", "int"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _npy,
    "npz": _npz,
    "ten": _tenbin,
    "safetensors": load,
}
