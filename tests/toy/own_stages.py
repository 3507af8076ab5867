"""Decoders and maps as a user writes them; some are wrong."""

import random
from typing import Any

import numpy as np
import torch

Sample = dict[str, Any]


def crop(sample: Sample, size: int = 3) -> Sample:
    """Rows of `png`, which is (C, H, W)."""
    at = random.randrange(4 - size + 1)
    return {**sample, "png": sample["png"][:, at : at + size]}


class Crop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, sample: Sample) -> Sample:
        return crop(sample, self.size)


def noise(sample: Sample) -> Sample:
    """From every generator there is."""
    return {**sample, "noise": [random.random(), np.random.random(), float(torch.rand(()))]}


def as_points(sample: Sample) -> Sample:
    """What toy_recipe's network takes, moved by the mean of the image."""
    points = {key: torch.as_tensor(sample[f"{key}.npy"]) for key in ("x", "y", "mask")}
    return {**points, "x": points["x"] + sample["png"].mean()}


def shout(extension: str, content: bytes, end: str = "!") -> str | None:
    return content.decode().upper() + end if extension == ".txt" else None


class Picky:
    """A decoder of numbers, one of which it can't."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, extension: str, content: bytes) -> None:
        if extension == ".cls" and int(content) == self.at:
            raise KeyError("not this one")


def forgets(sample: Sample) -> None:
    sample["png"] = None


def loses_one(sample: Sample) -> Sample | None:
    return None if sample["cls"] == 5 else sample


def two(sample: Sample, other: Sample) -> Sample:
    return {**sample, **other}


def no_function(size: int) -> int:
    return size
