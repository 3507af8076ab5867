"""Images for classification: a folder with a folder per class, and what data workers make of an image.

Training images are random crops, resized (Szegedy et al. 2014, arXiv:1409.4842), and mirrored at random. An image for
validation is resized to its shorter side and cropped in its middle. Pillow does both.

A sample leaves the worker as bytes (H, W, 3). The floats of a normalised image are four times as many to send, from the
worker and to the device. So `normalise` runs on the device. The bytes of a batch are in the order of torch's
channels-last format already.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.shards.decoders import decode, undecodable
from trainer.errors import ConfigError
from trainer.files import is_hidden
from trainer.log import log

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "ppm")  # those that Echelon decodes
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue, from 0 to 1
RATIOS = (3 / 4, 4 / 3)  # width to height of a random crop, the least and the greatest
TRIES = 10  # for a random crop that fits into the image


class ImageFolder(Dataset[dict[str, Any]]):
    """The images of `root/CLASS/`, at any depth, in the order of their names, without hidden ones.

    Args:
        root: The folder.
        classes: The names of the classes; None: the folders' names, sorted.
        key: The setting that named the folder, for errors.
        labelled: False: a folder whose images are all outside of folders is taken, too. Its samples have no `cls`.

    Raises:
        ConfigError: There is no image, or a folder is of no class, or an image lies outside of all.
    """

    def __init__(
        self, root: Path, classes: list[str] | None = None, key: str = "recipe.train", labelled: bool = True
    ) -> None:
        self.root = root
        images = sorted(p for p in root.rglob("*") if p.suffix[1:].lower() in EXTENSIONS and p.is_file())
        found = [path for path in images if not is_hidden(path.relative_to(root).as_posix())]
        if len(images) > len(found):
            log.info("%s=%s: %d hidden images are left out", key, root, len(images) - len(found))
        self.files = [path.relative_to(root).as_posix() for path in found]
        folders = sorted({name.partition("/")[0] for name in self.files if "/" in name})
        outside = [name for name in self.files if "/" not in name]
        self.labelled = labelled or bool(folders) or not outside
        if self.labelled and (not folders or outside):
            which = f"{outside[0]} is in no folder of a class" if outside else "there is no folder with images in it"
            raise ConfigError(f"{key}={root}: {which}; give a folder with a folder per class, or tar shards")
        self.classes = folders if classes is None else classes
        if unknown := [name for name in folders if name not in self.classes]:
            known = ", ".join(self.classes[:3])
            raise ConfigError(f"{key}={root}: the folder {unknown[0]} is no class; the classes are {known}, ...")
        number = {name: i for i, name in enumerate(self.classes)}
        self.labels = np.array([number[name.partition("/")[0]] for name in self.files if self.labelled])
        sizes = [path.stat().st_size for path in found]
        self.fingerprint = hashlib.sha256(repr([self.files, sizes, self.classes]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return `image`, a Pillow image in RGB, and `cls`, the number of its class if it has one.

        Raises:
            DataError: The file is no image.
            UnavailableError: The file can't be read.
        """
        path = self.root / self.files[i]
        try:
            image = decode(path.suffix[1:].lower(), path.read_bytes())
        except MemoryError:
            raise
        except Exception as error:  # Pillow may raise anything
            raise undecodable(error, path) from error
        return {"image": image, "cls": int(self.labels[i])} if self.labelled else {"image": image}


def image_of(sample: Mapping[str, Any]) -> "Image":
    """Return the image of a sample, which is of `ImageFolder` or of a shard.

    Raises:
        ConfigError: The sample has none.
    """
    for name in ("image", *EXTENSIONS):
        if name in sample:
            return sample[name]
    has = ", ".join(name for name in sample if not name.startswith("__"))
    raise ConfigError(f"recipe: a sample has {has}, and no image; give shards whose samples have a jpg or a png")


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


def augment(image: "Image", size: int, least: float, flip: bool, rng: Generator) -> np.ndarray:
    """Return a random crop as bytes (size, size, 3).

    Args:
        least: The smallest share of the image's area that a crop has.
        flip: Half of the crops are mirrored.
    """
    from PIL.Image import Resampling, Transpose

    box = crop_box(*image.size, least, rng)
    image = image.resize((size, size), Resampling.BILINEAR, box)
    if flip and rng.random() < 0.5:
        image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def crop_middle(image: "Image", size: int, shorter: int) -> np.ndarray:
    """Return the middle as bytes (size, size, 3), of the image resized to `shorter` pixels on its shorter side."""
    from PIL.Image import Resampling

    width, height = image.size
    side = min(width, height) * size / shorter  # of the crop, in pixels of the image
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return np.array(image.resize((size, size), Resampling.BILINEAR, box))


def normalise(images: Tensor, channels_last: bool) -> Tensor:
    """Return floats (B, 3, H, W) of bytes (B, H, W, 3), with ImageNet's mean 0 and deviation 1 in each channel."""
    mean, deviation = _statistics(images.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return ((images.permute(0, 3, 1, 2).float() / 255 - mean) / deviation).contiguous(memory_format=layout)


@cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation (3, 1, 1) on the device. One copy a process, for a copy waits for the device."""
    mean, deviation = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return mean, deviation
