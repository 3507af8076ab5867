"""Members that mean harm, and those that WebDataset decodes too."""

import io
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from webdataset import tenbin
from webdataset.autodecode import decoders as webdatasets

from trainer.data.shards.decoders import PIXELS, decode

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "ppm"])
def test_no_program_runs_for_an_image(extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow starts Ghostscript for PostScript, whatever the name."""
    program, said = tmp_path / "gs", tmp_path / "said"
    program.write_text(f"#!/bin/sh\necho called >> {said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    with pytest.raises(OSError, match="cannot identify image file"):
        decode(extension, EPS)
    assert not said.exists()


def test_an_image_has_no_more_pixels_than_its_bytes_account_for() -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    assert len(file.getvalue()) < 20_000 and PIXELS < 9000 * 9000
    began = time.process_time()
    with pytest.raises(ValueError, match=r"^9000 x 9000 pixels in \d+ bytes$"):
        decode("png", file.getvalue())
    assert time.process_time() - began < 1


def npy(version: int, shape: tuple[int, ...]) -> bytes:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("shape", [(10**11,), (10**6, 10**6), (-(10**6), -(10**6))])
def test_an_array_that_asks_for_all_memory(version: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        decode("npy", npy(version, shape))
    file = io.BytesIO()
    with __import__("zipfile").ZipFile(file, "w") as packed:
        packed.writestr("a.npy", npy(version, shape))
    with pytest.raises(ValueError):
        decode("npz", file.getvalue())


def test_an_npz_unpacks_to_little_more_than_its_size() -> None:
    """Zeros pack to a thousandth. Arrays of random numbers are read, whatever their size."""
    bomb, usual = io.BytesIO(), io.BytesIO()
    np.savez_compressed(bomb, a=np.zeros(70 << 20, np.uint8))
    with pytest.raises(ValueError, match=r"the arrays have 734\d+ bytes, and at most 67108864 are read of \d+ packed"):
        decode("npz", bomb.getvalue())
    values = np.random.default_rng(0).bytes(5 << 20)
    np.savez_compressed(usual, a=np.frombuffer(values * 14, np.uint8))
    assert decode("npz", usual.getvalue())["a"].tobytes() == values * 14


@pytest.mark.parametrize("extension", ["cls", "cls2", "id", "index", "inx"])
def test_numbers_are_webdatasets(extension: str) -> None:
    assert decode(extension, b"12\n") == webdatasets[extension](b"12\n") == 12


def test_words_and_json_are_webdatasets() -> None:
    for extension, content in (("transcript", "\u00e4".encode()), ("jsn", b'{"a": [1]}')):
        assert decode(extension, content) == webdatasets[extension](content)


def test_arrays_are_webdatasets() -> None:
    arrays = [np.arange(12, dtype=np.float32).reshape(3, 4), np.array([], np.int64), np.array([3], np.uint8)]
    content = bytes(tenbin.encode_buffer(arrays))
    file = io.BytesIO()
    np.savez_compressed(file, arrays[0], named=arrays[1])
    found, expected = decode("npz", file.getvalue()), webdatasets["npz"](file.getvalue())
    assert found.keys() == expected.keys() == {"arr_0", "named"}
    pairs = [*zip(decode("ten", content), webdatasets["ten"](content), strict=True)]
    assert len(pairs) == 3
    for one, other in [*pairs, *((found[name], expected[name]) for name in found)]:
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        assert one.flags.writeable


@pytest.mark.parametrize("wrong", ["name", "negative", "cut", "shape"])
def test_arrays_of_webdataset_that_are_damaged(wrong: str) -> None:
    content = bytearray(tenbin.encode_buffer([np.arange(40.0)]))
    if wrong == "name":
        content[0] ^= 1
    if wrong == "negative":
        content[8:16] = struct.pack("<q", -16)  # for ever, if it were taken
    if wrong == "shape":
        content[16 + 24 : 16 + 32] = struct.pack("<q", 10**12)
    with pytest.raises(ValueError):
        decode("ten", bytes(content[:100]) if wrong == "cut" else bytes(content))


def test_a_pickle_in_an_npz_is_refused() -> None:
    file = io.BytesIO()
    np.savez(file, np.array([print], dtype=object))
    with pytest.raises(ValueError):
        decode("npz", file.getvalue())


def test_a_ppm_is_an_image() -> None:
    file = io.BytesIO()
    Image.new("RGB", (5, 7), (1, 2, 3)).save(file, "PPM")
    assert decode("ppm", file.getvalue()).getpixel((4, 6)) == (1, 2, 3)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3, np.float16),
        np.zeros((0, 4), np.int8),
        np.array([(1, 2.0)], [("a", "i1"), ("b", "<f8")]),
        np.array(["ab", "c"]),
        np.array([b""], "S0"),
    ],
    ids=lambda value: str(value.dtype)[:20],
)
def test_arrays_are_numpys(value: np.ndarray) -> None:
    for version in ((1, 0), (2, 0), (3, 0)):
        file = io.BytesIO()
        np.lib.format.write_array(file, value, version)
        found, expected = (
            decode("npy", file.getvalue() + b"more"),
            np.lib.format.read_array(io.BytesIO(file.getvalue())),
        )
        assert (found.dtype, found.shape, found.strides) == (expected.dtype, expected.shape, expected.strides)
        assert found.tobytes() == expected.tobytes() and found.flags.writeable
        with pytest.raises(ValueError):
            decode("npy", file.getvalue()[:-1] if value.nbytes else file.getvalue()[:90])
