"""Crops, resizes and augments images. A JPEG is decoded once its crop is known, at the scale that the crop needs.

libjpeg-turbo, by the package simplejpeg, decodes JPEGs, and torch resizes their crops with antialiasing. Pillow decodes
and resizes all other images, and decodes the JPEGs in which libjpeg-turbo finds a fault.

Random crops are those of Szegedy et al. 2014, arXiv:1409.4842.
"""

import importlib.util
import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from numpy.random import Generator, Philox

from trainer.annotated import Above, AtMost, NonNegativeFloat, PositiveInt, check_arguments
from trainer.data.shards.decoders import PIXELS, Deferred, image_of_bytes, undecodable
from trainer.errors import ConfigError, require

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "ppm")  # those that Echelon decodes
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue, from 0 to 1
RATIOS = (3 / 4, 4 / 3)  # width to height of a random crop, the least and the greatest
TRIES = 10  # for a random crop that fits into the image
SCALES = (8, 4, 2)  # divisors of width and height for which libjpeg-turbo has a fast transform
JITTERS = ("Brightness", "Contrast", "Color")  # of Pillow's ImageEnhance; the fourth is the hue
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Jpeg(Deferred):
    """A compressed JPEG, which is decoded for each crop."""

    def __init__(self, content: bytes, width: int, height: int) -> None:
        self.content, self.size = content, (width, height)

    def crop(self, box: Box, size: int) -> np.ndarray:
        """Return a part of the image, resized to bytes (size, size, 3).

        Where the shorter side of the part has at least N times `size` pixels, for N of `SCALES`, the image is decoded
        at an Nth of its width and height. The corners of `box` are rounded to pixels of the decoded image.

        Raises:
            DataError: The JPEG is damaged.
        """
        sides = box[2] - box[0], box[3] - box[1]
        scale = next((scale for scale in SCALES if min(sides) >= scale * size), 1)
        pixels = self.decode(scale)
        left, top, right, bottom = (round(corner / scale) for corner in box)
        return resize(pixels[top : max(bottom, top + 1), left : max(right, left + 1)], size)

    def decode(self, scale: int = 1) -> np.ndarray:
        """Return all pixels as bytes (H, W, 3). `scale` is 1 or of `SCALES`, and divides width and height."""
        import simplejpeg

        width, height = (-(-side // scale) for side in self.size)
        try:
            return simplejpeg.decode_jpeg(self.content, "RGB", min_height=height, min_width=width)
        except ValueError:  # Pillow may know how to read it, and decides what counts as damaged
            pass
        try:
            return np.array(image_of_bytes(self.content, scale))
        except MemoryError:
            raise
        except Exception as error:  # Pillow may raise anything
            raise undecodable(error, self.place or "a JPEG") from error


def check_simplejpeg(key: str) -> None:
    if not importlib.util.find_spec("simplejpeg"):
        raise ConfigError(f"{key}: needs simplejpeg; pip install 'simplejpeg>=1.8,<2'")


class LazyJpeg:
    """A decoder for `data.decoders` that leaves JPEGs compressed, as `Jpeg`, until a map or a transform crops them.

    Other images, and JPEGs with four channels, are left to the next decoder.

    Raises:
        ConfigError: simplejpeg is not installed.
    """

    def __init__(self) -> None:
        check_simplejpeg("data.decoders: LazyJpeg")

    def __call__(self, extension: str, content: bytes) -> Jpeg | None:
        import simplejpeg

        if extension.rpartition(".")[2] not in ("jpg", "jpeg"):
            return None
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        except ValueError:
            return None
        if colours not in ("YCbCr", "RGB", "Gray") or int(width) * int(height) > PIXELS:
            return None
        return Jpeg(content, int(width), int(height))


class Augment:
    """A function for `data.map`: a random crop of a sample's image, or its middle if the sample is not trained on.

    Args:
        size: Pixels of a side.
        val_resize: Pixels of the shorter side for validation, of which the middle `size` pixels are taken. None: 8/7 of
            `size`.
        crop: The smallest share of an image's area that a random crop has; 1: no random crops.
        flip: Half of the random crops are mirrored.
        jitter: The largest changes of brightness, contrast and saturation, as shares, and of the hue, as a share of the
            circle, up to 0.5. They apply to random crops in random order; those left out are 0.
        normalise: Give floats with ImageNet's mean 0 and deviation 1 in each channel. False: bytes, a quarter of the
            size, to be normalised on the device.
    """

    @check_arguments("data.map: Augment.")
    def __init__(
        self,
        size: PositiveInt = 224,
        val_resize: PositiveInt | None = None,
        crop: Annotated[float, Above(0), AtMost(1)] = 0.08,
        flip: bool = True,
        jitter: tuple[NonNegativeFloat, ...] = (),
        normalise: bool = False,
    ) -> None:
        self.size, self.val_resize = size, size * 8 // 7 if val_resize is None else val_resize
        require("data.map: Augment.val_resize", self.val_resize, at_least=size)
        if len(jitter) > 4 or max(jitter[3:], default=0) > 0.5:
            raise ConfigError(f"data.map: Augment.jitter={list(jitter)}: give up to four numbers, the last at most 0.5")
        self.crop, self.flip, self.jitter, self.normalise = crop, flip, tuple(jitter), normalise

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        key, image = image_of(sample)
        rng = Generator(Philox(key=random.getrandbits(64)))  # `random` is seeded for each sample
        pixels = augment(image, self.size, self.crop, self.flip, rng)
        if any(self.jitter):
            pixels = jitter(pixels, self.jitter, rng)
        return {**sample, key: self._tensor(pixels)}

    def val_map(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        key, image = image_of(sample)
        return {**sample, key: self._tensor(crop_middle(image, self.size, self.val_resize))}

    def _tensor(self, pixels: np.ndarray) -> torch.Tensor:
        """Return a tensor (3, H, W) of pixels (H, W, 3)."""
        made = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        if not self.normalise:
            return made
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
        return (made.float() / 255 - mean) / deviation


def image_key(sample: Mapping[str, Any]) -> str:
    """Return the key of the image in a sample.

    Raises:
        ConfigError: The sample has none.
    """
    if found := next((name for name in ("image", *EXTENSIONS) if name in sample), None):
        return found
    has = ", ".join(name for name in sample if not name.startswith("__"))
    raise ConfigError(f"recipe: a sample has {has}, and no image; give shards whose samples have a jpg or a png")


def image_of(sample: Mapping[str, Any]) -> "tuple[str, Image | Jpeg]":
    """Return the key of the image in a sample, and the image: a `Jpeg`, or of Pillow in RGB.

    Raises:
        ConfigError: The sample has no image, or a decoder made something else of it.
    """
    image = sample[key := image_key(sample)]
    if isinstance(image, Jpeg):
        return key, image
    from PIL.Image import Image

    if not isinstance(image, Image):
        kind = f"{type(image).__module__}.{type(image).__name__}".removeprefix("builtins.")
        fix = "leave it to Echelon's decoders, or make a Pillow image of it in data.map"
        raise ConfigError(f"recipe: the {key} of a sample is of the class {kind}, and no image; {fix}")
    return key, image if image.mode == "RGB" else image.convert("RGB")


def resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """Return bytes (H, W, 3) as bytes (size, size, 3), by torch's bilinear filter with antialiasing.

    Each pixel differs by at most 1 from Pillow's, and all are equal if nothing is to be resized.
    """
    made = torch.nn.functional.interpolate(_channels_last(pixels), (size, size), mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def _channels_last(pixels: np.ndarray) -> torch.Tensor:
    """Return a view (1, 3, H, W) in the channels-last format, which torch's operations keep."""
    return torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)


def resized(image: "Image | Jpeg", box: Box, size: int) -> np.ndarray:
    """Return a part of an image as bytes (size, size, 3)."""
    if isinstance(image, Jpeg):
        return image.crop(box, size)
    from PIL.Image import Resampling

    return np.array(image.resize((size, size), Resampling.BILINEAR, box))


def crop_box(
    width: int, height: int, least: float, rng: Generator, ratios: tuple[float, float] = RATIOS
) -> tuple[int, int, int, int]:
    """Return the left, top, right and bottom of a random crop.

    The share of the area is uniform from `least` to 1. The logarithm of width to height is uniform between those of
    `ratios`. If no crop of `TRIES` fits, the largest middle of such a ratio is the crop.
    """
    for _ in range(TRIES):
        area = rng.uniform(least, 1.0) * width * height
        ratio = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * ratios[1])), min(height, round(width / ratios[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def augment(image: "Image | Jpeg", size: int, least: float, flip: bool, rng: Generator) -> np.ndarray:
    """Return a random crop as bytes (size, size, 3).

    Args:
        least: The smallest share of the image's area that a crop has.
        flip: Half of the crops are mirrored.
    """
    pixels = resized(image, crop_box(*image.size, least, rng), size)
    if flip and rng.random() < 0.5:
        pixels = _channels_last(pixels).flip(3)[0].permute(1, 2, 0).numpy()
    return pixels


def crop_middle(image: "Image | Jpeg", size: int, shorter: int) -> np.ndarray:
    """Return the middle as bytes (size, size, 3), of the image resized to `shorter` pixels on its shorter side."""
    width, height = image.size
    side = min(width, height) * size / shorter  # of the crop, in pixels of the image
    left, top = (width - side) / 2, (height - side) / 2
    return resized(image, (left, top, left + side, top + side), size)


def jitter(pixels: np.ndarray, amounts: Sequence[float], rng: Generator) -> np.ndarray:
    """Change brightness, contrast, saturation and hue in random order, by up to `amounts`, as torchvision does."""
    from PIL import Image, ImageEnhance

    image = Image.fromarray(pixels)
    for number in rng.permutation(len(amounts)):
        amount = amounts[number]
        if number < len(JITTERS):
            factor = rng.uniform(max(0.0, 1 - amount), 1 + amount)
            image = getattr(ImageEnhance, JITTERS[number])(image).enhance(factor)
        else:
            hsv = np.array(image.convert("HSV"))
            hsv[..., 0] += np.uint8(round(255 * rng.uniform(-amount, amount)) % 256)  # wraps around
            image = Image.frombytes("HSV", image.size, hsv.tobytes()).convert("RGB")
    return np.array(image)
