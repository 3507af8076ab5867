"""Crops and their bounds; JPEGs decoded for a crop have Pillow's pixels; augmentations; what is refused."""

import io
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter
from support.messages import refuses

from trainer.config.options import DataOptions
from trainer.data.images import (
    DEVIATION,
    MEAN,
    SCALES,
    Augment,
    Jpeg,
    LazyJpeg,
    augment,
    crop_box,
    crop_middle,
    image_key,
    jitter,
    resize,
)
from trainer.data.opening import open_source
from trainer.data.sampling.order import Ref, Refs
from trainer.data.shards.decoders import PIXELS, decode, image_of_bytes
from trainer.data.shards.transforms import build_stages
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import ConfigError, DataError


def ramp(width: int, height: int) -> Image.Image:
    """Red grows to the right, green to the bottom."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), np.zeros_like(x)], -1)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize(("width", "height"), [(8, 8), (500, 375), (40, 400), (1, 1), (1000, 3)])
def test_a_random_crop_lies_in_the_image_and_has_the_area_and_the_ratio(width: int, height: int) -> None:
    shares = []
    for seed in range(300):
        left, top, right, bottom = crop_box(width, height, 0.08, np.random.default_rng(seed))
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        w, h = right - left, bottom - top
        shares.append(w * h / (width * height))
        # Rounding moves each side by half a pixel.
        assert (w - 0.5) / (h + 0.5) <= 4 / 3 * 1.001 and (w + 0.5) / (h - 0.5 or 1) >= 3 / 4 * 0.999
    if width == 500:
        assert min(shares) >= 0.079 and max(shares) > 0.9 and np.mean(shares) == pytest.approx(0.5, abs=0.06)
        corners = {crop_box(width, height, 0.08, np.random.default_rng(seed))[:2] for seed in range(50)}
        assert len(corners) == 50


def test_of_an_image_that_no_ratio_fits_the_middle_is_taken() -> None:
    assert crop_box(40, 400, 1.0, np.random.default_rng(0)) == (0, 173, 40, 226)
    assert crop_box(12, 12, 1.0, np.random.default_rng(0)) == (0, 0, 12, 12)


def test_an_augmentation_is_a_function_of_its_generator() -> None:
    image = ramp(60, 40)
    first, same, other = (augment(image, 16, 0.08, True, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (first == same).all() and (first != other).any()
    assert first.shape == (16, 16, 3) and first.dtype == np.uint8
    plain = {augment(image, 16, 0.08, False, np.random.default_rng(seed))[8].tobytes() for seed in range(20)}
    assert len(plain) == 20


def test_half_of_the_crops_are_mirrored() -> None:
    def mirrored(flip: bool) -> float:
        crops = [augment(ramp(30, 30), 8, 0.5, flip, np.random.default_rng(seed)).astype(int) for seed in range(400)]
        return float(np.mean([crop[4, 0, 0] > crop[4, -1, 0] for crop in crops]))

    assert mirrored(flip=False) == 0.0
    assert mirrored(flip=True) == pytest.approx(0.5, abs=0.08)


def test_a_crop_shows_its_part_of_the_image() -> None:
    rng = np.random.default_rng(5)
    left, top, right, bottom = crop_box(256, 256, 0.08, np.random.default_rng(5))
    crop = augment(ramp(256, 256), 32, 0.08, False, rng)
    assert crop[:, 0, 0].mean() == pytest.approx(left, abs=6) and crop[:, -1, 0].mean() == pytest.approx(right, abs=6)
    assert crop[0, :, 1].mean() == pytest.approx(top, abs=6) and crop[-1, :, 1].mean() == pytest.approx(bottom, abs=6)


def test_the_middle_of_an_image() -> None:
    """A quarter of a 256 x 512 image, resized to a shorter side of 128, and 64 of it."""
    crop = crop_middle(ramp(256, 512), 64, 128).astype(int)
    assert crop.shape == (64, 64, 3)
    assert (crop[0, 0, 0], crop[0, -1, 0]) == (pytest.approx(64, abs=4), pytest.approx(191, abs=4))
    assert (crop[0, 0, 1], crop[-1, 0, 1]) == (pytest.approx(255 * 3 / 8, abs=4), pytest.approx(255 * 5 / 8, abs=4))
    image = ramp(8, 8)
    assert (crop_middle(image, 8, 8) == np.array(image)).all()  # nothing to resize: the image as it is


def scene(width: int, height: int, seed: int) -> Image.Image:
    """Smooth colours, 40 shapes with edges of about 2 pixels, and grain: more like a photo than noise is."""
    draws = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(width, height)
    pixels = np.full((height, width, 3), 128.0)
    for channel in range(3):
        for octave in range(4):
            fx, fy = draws.uniform(0.5, 3 << octave, 2)
            pixels[..., channel] += 60 / 2**octave * np.sin(2 * np.pi * (fx * x + fy * y) + draws.uniform(0, 6))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(40):
        at, half = draws.uniform((0, 0), (width, height)), draws.uniform(0.01, 0.15, 2) * max(width, height)
        shape = pen.ellipse if draws.random() < 0.5 else pen.rectangle
        shape([*(at - half), *(at + half)], fill=tuple(draws.integers(0, 256, 3).tolist()))
    soft = np.asarray(image.filter(ImageFilter.GaussianBlur(1))) + draws.normal(0, 6, (height, width, 1))
    return Image.fromarray(soft.clip(0, 255).astype(np.uint8))


def jpeg_bytes(image: Image.Image, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 90} | settings)
    return file.getvalue()


def lazy(content: bytes) -> Jpeg:
    made = LazyJpeg()("jpg", content)
    assert isinstance(made, Jpeg)
    return made


def difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.abs(one.astype(int) - other)


@pytest.mark.parametrize(
    "settings",
    [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"quality": 30}, {"keep_rgb": True}],
    ids=str,
)
@pytest.mark.parametrize("size", [(131, 77), (64, 48), (9, 17), (1, 1)], ids=str)
def test_decoded_pixels_are_pillows(size: tuple[int, int], settings: dict[str, Any]) -> None:
    """Every one, at every scale, also of a grey image: the transform and the upsampling are the exact ones."""
    for mode in ("RGB",) if "keep_rgb" in settings or "subsampling" in settings else ("RGB", "L"):
        content = jpeg_bytes(scene(*size, 0).convert(mode), **settings)
        image = lazy(content)
        assert image.size == size
        for scale in (1, *(scale for scale in SCALES if scale <= min(size))):
            found, expected = image.decode(scale), np.array(image_of_bytes(content, scale))
            assert found.shape == (-(-size[1] // scale), -(-size[0] // scale), 3)
            assert found.shape == expected.shape and (found == expected).all()


@pytest.mark.parametrize("box", [(10, 20, 290, 250), (0, 0, 64, 64), (5, 7, 280, 40), (30, 10, 80, 220)], ids=str)
def test_a_resized_pixel_is_pillows_to_within_one(box: tuple[int, int, int, int]) -> None:
    """Larger, smaller, and both. Pillow resizes the crop, since otherwise it looks beyond the crop's edges."""
    image = scene(300, 260, 1).crop(box)
    expected = np.array(image.resize((64, 64), Image.Resampling.BILINEAR))
    found = difference(resize(np.array(image), 64), expected)
    assert found.max() <= 1 and found.mean() < 0.25


def test_crops_are_pillows_to_within_the_bound() -> None:
    """Unscaled, inner pixels differ by 1 at most. Scaled, the mean over a crop by less than 3, and 99 % by 32 at most.

    The same random numbers give the same crop. docs/samples.md has the bounds.
    """
    unscaled, scaled = [], []
    for seed in range(3):
        small, large = jpeg_bytes(scene(300, 225, seed)), jpeg_bytes(scene(1200, 900, seed))
        for each in range(4):
            rngs = [np.random.default_rng(each) for _ in range(4)]
            unscaled.append(difference(
                augment(lazy(small), 96, 0.08, True, rngs[0]), augment(decode("jpg", small), 96, 0.08, True, rngs[1])
            )[4:-4, 4:-4])  # fmt: skip
            scaled.append(difference(
                augment(lazy(large), 96, 0.08, True, rngs[2]), augment(decode("jpg", large), 96, 0.08, True, rngs[3])
            ))  # fmt: skip
        scaled.append(difference(crop_middle(lazy(large), 224, 256), crop_middle(decode("jpg", large), 224, 256)))
    assert max(map(np.max, unscaled)) <= 1
    assert max(map(np.mean, scaled)) < 3 and max(np.percentile(each, 99) for each in scaled) <= 32


def test_the_scale_leaves_a_crop_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    whole = Jpeg.decode
    monkeypatch.setattr(Jpeg, "decode", lambda self, scale: (asked.append(scale), whole(self, scale))[1])
    image = lazy(jpeg_bytes(Image.new("RGB", (800, 600))))
    for side in (63, 64, 127, 128, 256, 512, 600):
        assert image.crop((100, 0, 100 + side, side), 64).shape == (64, 64, 3)
    assert asked == [1, 1, 1, 2, 4, 8, 8]
    assert image.crop((799, 599, 800, 600), 4).shape == (4, 4, 3)


def test_images_that_pillow_decodes() -> None:
    """Other formats, also under a JPEG's name, and four channels."""
    file = io.BytesIO()
    scene(20, 10, 0).save(file, "PNG")
    cmyk = jpeg_bytes(scene(20, 10, 0).convert("CMYK"))
    for extension, content in (("png", file.getvalue()), ("jpg", file.getvalue()), ("jpg", cmyk), ("txt", b"a")):
        assert LazyJpeg()(f".{extension}", content) is None
    assert decode("jpg", cmyk, [LazyJpeg()]).mode == "RGB"
    assert isinstance(decode("left.jpeg", jpeg_bytes(scene(8, 8, 0)), [LazyJpeg()]), Jpeg)


def test_exif_turns_no_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = jpeg_bytes(scene(20, 10, 0), exif=exif)
    assert lazy(content).size == decode("jpg", content).size == (20, 10)


def test_an_image_of_many_pixels_is_refused_before_memory_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(jpeg_bytes(Image.new("L", (8, 8))))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = (20_000).to_bytes(2, "big") * 2
    assert simplejpeg.decode_jpeg_header(bytes(content))[:2] == (20_000, 20_000) and PIXELS < 20_000**2
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"^20000 x 20000 pixels in \d+ bytes$"):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        decode("jpg", bytes(content), [LazyJpeg()])


def test_a_fault_that_pillow_passes_over_is_no_damage() -> None:
    """libjpeg-turbo warns of bytes in front of the last marker, as in some known photos, and Pillow decodes them."""
    content = jpeg_bytes(scene(64, 48, 0))[:-2] + bytes(4) + b"\xff\xd9"
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(content)
    found = lazy(content)
    for scale in (1, 2):
        assert (found.decode(scale) == np.array(image_of_bytes(content, scale))).all()


class Images:
    """The shards of a folder, whose JPEGs stay compressed."""

    def __init__(self, folder: Any) -> None:
        self.shards = str(folder / "train-*.tar")

    def data(self, split: str) -> str:
        return self.shards


LAZY = {"_target_": "trainer.data.images.LazyJpeg"}
AUGMENT = {"_target_": "trainer.data.images.Augment", "size": 16}


def shards_of(folder: Any, contents: list[bytes], split: str = "train", **augment: Any) -> Samples:
    if not folder.exists():
        samples = ({"__key__": str(i), "jpg": content, "cls": i} for i, content in enumerate(contents))
        write_shards(samples, folder, "train", per_shard=4)
    stages = build_stages({"decoders": [LAZY], "map": [AUGMENT | augment]}, ())
    made = open_source(Images(folder), split, 7, DataOptions(workers=0, **stages))
    assert isinstance(made, Samples)
    return made


def test_a_config_names_the_decoder_and_the_map(tmp_path: Any) -> None:
    """Crops depend on seed, epoch and sample alone, and samples that are not trained on are not augmented."""
    contents = [jpeg_bytes(scene(80, 60, seed)) for seed in range(8)]
    refs = [Ref(epoch, shard, offset) for epoch in (0, 1) for shard in (0, 1) for offset in range(4)]
    source = shards_of(tmp_path / "shards", contents)
    together, bad = source.batch(Refs(refs))
    assert not bad and {sample["jpg"].shape for sample in together} == {(3, 16, 16)}
    assert [sample["cls"] for sample in together] == [*range(8)] * 2 and together[0]["jpg"].dtype == torch.uint8
    for ref, expected in list(zip(refs, together, strict=True))[::-1]:  # as in other workers, in another order
        (sample,), _ = shards_of(tmp_path / "shards", contents).batch(Refs([ref]))
        assert torch.equal(sample["jpg"], expected["jpg"])
    assert not torch.equal(together[0]["jpg"], together[8]["jpg"])
    first, second = (
        shards_of(tmp_path / "shards", contents, "val").batch(Refs([ref]))[0][0] for ref in (refs[0], refs[8])
    )
    middle = crop_middle(lazy(contents[0]), 16, 18)
    assert torch.equal(first["jpg"], second["jpg"]) and (first["jpg"].permute(1, 2, 0).numpy() == middle).all()


def test_a_damaged_jpeg_of_a_shard_is_left_out_by_name(tmp_path: Any) -> None:
    contents = [jpeg_bytes(scene(80, 60, seed)) for seed in range(3)]
    contents[1] = contents[1][:-200]
    good, bad = shards_of(tmp_path / "shards", contents).batch(Refs([Ref(0, 0, i) for i in range(3)]))
    assert [sample["cls"] for sample in good] == [0, 2]
    (only,) = bad
    name = f"{tmp_path}/shards/train-000000.tar: sample 1 ('1'), member 'jpg': can't be decoded ("
    assert only.why.startswith(name) and "truncated" in only.why and only.key == "1"
    with pytest.raises(DataError, match=r"^a JPEG: can't be decoded"):
        lazy(contents[1]).decode()


def test_normalised_floats() -> None:
    sample = {"__key__": "0", "png": scene(40, 30, 0), "cls": 1}
    plain, floats = (Augment(8, 8, normalise=normalise).val_map(sample) for normalise in (False, True))
    for channel in range(3):
        expected = (plain["png"][channel].numpy() / 255 - MEAN[channel]) / DEVIATION[channel]
        assert floats["png"][channel].numpy() == pytest.approx(expected, abs=1e-5)
    assert plain["png"].is_contiguous() and plain["cls"] == 1 and sample["png"].size == (40, 30)


def test_colours_change_by_up_to_the_amounts() -> None:
    """One at a time against Pillow's; none is no change; and the order is drawn."""
    image = scene(24, 24, 3)
    pixels = np.array(image)
    assert (jitter(pixels, (0, 0, 0, 0), np.random.default_rng(0)) // 4 == pixels // 4).mean() > 0.7  # by HSV and back
    assert (jitter(pixels, (0, 0, 0), np.random.default_rng(0)) == pixels).all()
    for number, kind in enumerate((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)):
        amounts = [0.0, 0.0, 0.0]
        amounts[number] = 0.5
        rng, same = np.random.default_rng(number), np.random.default_rng(number)
        at = list(same.permutation(3)).index(number)
        factor = [same.uniform(0.5 if i == at else 1, 1.5 if i == at else 1) for i in range(3)][at]
        assert (jitter(pixels, amounts, rng) == np.array(kind(image).enhance(factor))).all()
    hues = [jitter(pixels, (0, 0, 0, 0.5), np.random.default_rng(seed)) for seed in range(4)]
    greys = [np.array(Image.fromarray(hue).convert("HSV"))[..., 2] for hue in hues]
    assert len({hue.tobytes() for hue in hues}) == 4
    assert all(difference(grey, np.array(image.convert("HSV"))[..., 2]).max() <= 1 for grey in greys)
    seed_crops = partial(Augment(16, jitter=[0.4, 0.4, 0.4, 0.1]), {"png": image})
    random.seed(3)
    first = seed_crops()["png"]
    random.seed(3)
    assert torch.equal(first, seed_crops()["png"]) and not torch.equal(first, seed_crops()["png"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": 0}, {"size": 8.5}, {"size": "8"}, {"val_resize": 100}, {"crop": 0}, {"crop": float("nan")},
        {"crop": [0.1, 1]}, {"flip": 0.5}, {"jitter": 0.4}, {"jitter": [0.1] * 5}, {"jitter": [-1]},
        {"jitter": [float("nan")]}, {"jitter": [0, 0, 0, 1]}, {"normalise": "imagenet"},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_are_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=rf"^data\.map: Augment\.{name}(\.\d)?="):
        Augment(**arguments)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_an_image_of_another_mode_becomes_rgb(mode: str) -> None:
    """Such as one that a decoder of the user's gives."""
    image = scene(20, 16, 0).convert(mode)
    made = Augment(8, 8).val_map({"png": image})["png"]
    assert torch.equal(made, Augment(8, 8).val_map({"png": image.convert("RGB")})["png"]) and made.shape == (3, 8, 8)


def test_an_image_that_is_an_array_is_refused() -> None:
    with refuses("recipe", "the png of a sample is of the class numpy.ndarray", "make a Pillow image of it"):
        Augment(8)({"png": np.zeros((8, 8, 3), np.uint8)})


def test_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses("data.decoders", "'simplejpeg>=1.8,<2'"):
        build_stages({"decoders": [LAZY]}, ())


def test_the_image_of_a_sample_of_a_shard() -> None:
    image = ramp(2, 2)
    assert image_key({"__key__": "0", "cls": 1, "png": image}) == "png" and image_key({"image": image}) == "image"
    with refuses("recipe", "image", "jpg"):
        image_key({"__key__": "0", "cls": 1, "txt": "a"})
