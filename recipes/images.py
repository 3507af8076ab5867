"""Images for classification: a folder with a folder per class, and the normalisation of a batch.

A sample leaves the worker as bytes (H, W, 3). The floats of a normalised image are four times as many to send, from the
worker and to the device. So `normalise` runs on the device. The bytes of a batch are in the order of torch's
channels-last format already.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.images import DEVIATION, EXTENSIONS, MEAN
from trainer.data.shards.decoders import Deferred, decode, undecodable
from trainer.errors import ConfigError
from trainer.files import is_hidden
from trainer.log import log


class ImageFolder(Dataset[dict[str, Any]]):
    """The images of `root/CLASS/`, at any depth, in the order of their names, without hidden ones.

    Args:
        root: The folder.
        classes: The names of the classes; None: the folders' names, sorted.
        key: The setting that named the folder, for errors.
        labelled: False: a folder whose images are all outside of folders is taken, too. Its samples have no `cls`.
        decoders: Functions (".jpg", bytes) -> value, as in `data.decoders`.

    Raises:
        ConfigError: There is no image, or a folder is of no class, or an image lies outside of all.
    """

    def __init__(
        self,
        root: Path,
        classes: list[str] | None = None,
        key: str = "recipe.train",
        labelled: bool = True,
        decoders: Sequence[Callable[[str, bytes], Any]] = (),
    ) -> None:
        self.root, self.decoders = root, decoders
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
        """Return `image`, a Pillow image in RGB unless a decoder applies, and `cls`, its class's number if it has one.

        Raises:
            DataError: The file is no image.
            UnavailableError: The file can't be read.
        """
        path = self.root / self.files[i]
        try:
            image = decode(path.suffix[1:].lower(), path.read_bytes(), self.decoders)
        except MemoryError:
            raise
        except Exception as error:  # Pillow may raise anything
            raise undecodable(error, path) from error
        if isinstance(image, Deferred):
            image.place = str(path)
        return {"image": image, "cls": int(self.labels[i])} if self.labelled else {"image": image}


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
