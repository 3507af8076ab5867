"""Scans with labels for segmentation: NIfTI or NPZ files in folders, members of shards, and the scans of nibabel.

An image is (H, W) or (H, W, D), or has its channels last; a label has a class for each element. Intensities become mean
0 and deviation 1 in each scan and channel. The size of an element in millimetres is not read: resample scans before
that differ in it.
"""

import functools
import gzip
import hashlib
import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainer.errors import ConfigError, DataError, UnavailableError

NIFTI = (".nii.gz", ".nii")
INSTALL = "pip install 'echelon-trainer[monai]'"
OPEN_SCANS = 8  # that a data worker keeps decoded
EXAMPLE = "example4d.nii.gz"  # of nibabel: two volumes of a head, 128 x 96 x 24, by echo-planar imaging
EVERY = 4  # slices of nibabel's scan, of which the last is for validation
AIR, HEAD = 0, 1  # classes of nibabel's scan
BINS = 256  # of the histogram for a threshold
SMOOTHED = 2.0  # elements: the deviation of the filter before the threshold

Sample = dict[str, np.ndarray]  # image (C, H, W[, D]) in float32, label (H, W[, D]) in int64


def check_installed() -> None:
    """Refuse a recipe of scans where MONAI or nibabel is missing."""
    for name in ("monai", "nibabel"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"recipe: needs {name}; {INSTALL}")


def make_sample(image: np.ndarray, label: np.ndarray, dimensions: int, classes: int, place: str) -> Sample:
    """Return image and label as the model takes them.

    Raises:
        DataError: Their shapes differ, or the label has a class that there is not.
    """
    image, label = np.asarray(image, np.float32), np.asarray(label)
    if image.ndim == dimensions:
        image = image[..., None]
    if image.ndim != dimensions + 1 or image.shape[:-1] != label.shape:
        raise DataError(
            f"{place}: image {image.shape[:-1]} and label {label.shape} are not both of recipe.dimensions={dimensions}"
        )
    classified = np.rint(label).astype(np.int64)
    if classified.min() < 0 or classified.max() >= classes:
        raise DataError(f"{place}: the label has classes {classified.min()} to {classified.max()}, of {classes}")
    axes = tuple(range(dimensions))
    deviation = np.maximum(image.std(axes), 1e-6)
    return {
        "image": np.ascontiguousarray(np.moveaxis((image - image.mean(axes)) / deviation, -1, 0)),
        "label": classified,
    }


def decode(data: bytes, place: str) -> np.ndarray:
    """Return the values of a NIfTI file's bytes, compressed or not.

    Raises:
        DataError: They are no NIfTI file.
    """
    import nibabel

    try:
        return np.asarray(
            nibabel.Nifti1Image.from_bytes(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).dataobj
        )
    except MemoryError:
        raise
    except Exception as error:  # nibabel may raise anything
        raise DataError(f"{place}: can't be decoded ({error}); write it again or remove it") from error


def of_members(sample: Mapping[str, Any], dimensions: int, classes: int) -> Sample:
    """Return the sample of a shard, with members `image.nii.gz` and `label.nii.gz`, or one `npz` of these names."""
    place = str(sample.get("__key__"))
    if "npz" in sample:
        values = sample["npz"]
    else:
        values = {
            name: decode(sample[name + end], f"{place}.{name}{end}")
            for name in ("image", "label")
            for end in NIFTI
            if name + end in sample
        }
    if not {"image", "label"} <= set(values):
        has = ", ".join(name for name in sample if not name.startswith("__"))
        raise ConfigError(f"recipe.train: a sample has {has}; give image.nii.gz and label.nii.gz, or an npz of both")
    return make_sample(values["image"], values["label"], dimensions, classes, place)


class ScanFolder(Dataset[Sample]):
    """The scans of a folder, in the order of their names. 2-D samples of 3-D scans are their slices.

    There are `images/NAME.nii.gz` and `labels/NAME.nii.gz`, as in the Medical Segmentation Decathlon (Antonelli et al.
    2022, arXiv:2106.05735), or `NAME.npz` with `image` and `label`.

    Raises:
        ConfigError: There is no scan, or one has no label.
    """

    def __init__(self, root: Path, dimensions: int, classes: int, key: str) -> None:
        self.root, self.dimensions, self.classes = root, dimensions, classes
        nifti = [path for path in sorted((root / "images").glob("*")) if path.name.endswith(NIFTI)]
        self.files = nifti or sorted(root.glob("*.npz"))
        if not self.files:
            raise ConfigError(f"{key}={root}: has no images/NAME.nii.gz and no NAME.npz; give a folder that has")
        if missing := [path.name for path in nifti if not (root / "labels" / path.name).is_file()]:
            raise ConfigError(f"{key}={root}: labels/{missing[0]} is missing; give each image a label of its name")
        self.read = functools.lru_cache(OPEN_SCANS)(self._read)
        shapes = [self.read(i)[1].shape for i in range(len(self.files))]
        self.slices = [
            (i, z) for i, shape in enumerate(shapes) for z in (range(shape[-1]) if len(shape) > dimensions else [None])
        ]
        sizes = [(path.name, path.stat().st_size) for path in self.files]
        self.fingerprint = hashlib.sha256(repr([sizes, dimensions, classes]).encode()).hexdigest()

    def _read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        path = self.files[i]
        try:
            if path.suffix == ".npz":
                with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as values:
                    return values["image"], values["label"]
            label = self.root / "labels" / path.name
            return decode(path.read_bytes(), str(path)), decode(label.read_bytes(), str(label))
        except OSError as error:
            if not error.errno:  # NumPy's own errors have no number
                raise DataError(f"{path}: can't be decoded ({error}); write it again or remove it") from error
            raise UnavailableError(f"{path}: {error}; fix the cause, then resume") from error
        except (ValueError, KeyError) as error:
            raise DataError(f"{path}: has no arrays image and label ({error}); write it again or remove it") from error

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, i: int) -> Sample:
        number, z = self.slices[i]
        image, label = self.read(number)
        if z is not None:
            image, label = image[:, :, z], label[:, :, z]
        return make_sample(image, label, self.dimensions, self.classes, str(self.files[number]))


class ExampleScans(Dataset[Sample]):
    """The two volumes of a head that nibabel ships for its tests: real scans, with labels made by rule.

    The label is a threshold (Otsu 1979) of the smoothed scan: head or air. In 2-D, each fourth slice is for validation.
    In 3-D it is the right half of both volumes, and the left half is for training.
    """

    def __init__(self, split: str, dimensions: int) -> None:
        import nibabel

        path = Path(nibabel.__file__).parent / "tests" / "data" / EXAMPLE
        if not path.is_file():
            raise ConfigError(f"recipe.train=null: {path} is missing; install nibabel whole, or give a folder of scans")
        volumes = np.moveaxis(decode(path.read_bytes(), str(path)).astype(np.float32), -1, 0)
        labels = np.stack([head_or_air(volume) for volume in volumes])
        if dimensions == 3:
            half = slice(None, 64) if split == "train" else slice(64, None)
            pairs = list(zip(volumes[:, half], labels[:, half], strict=True))
        else:
            chosen = [z for z in range(volumes.shape[-1]) if (z % EVERY == EVERY - 1) == (split == "val")]
            pairs = [(volume[..., z], label[..., z]) for volume, label in zip(volumes, labels) for z in chosen]
        self.samples = [make_sample(image, label, dimensions, 2, EXAMPLE) for image, label in pairs]
        self.fingerprint = f"{EXAMPLE} {split} {dimensions}"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Sample:
        return self.samples[i]


class Repeated(Dataset[Sample]):
    """A data set several times: an epoch takes so many patches of each scan."""

    def __init__(self, scans: ScanFolder | ExampleScans, times: int) -> None:
        self.scans, self.times, self.fingerprint = scans, times, f"{times} x {scans.fingerprint}"

    def __len__(self) -> int:
        return self.times * len(self.scans)

    def __getitem__(self, i: int) -> Sample:
        return self.scans[i % len(self.scans)]


def head_or_air(volume: np.ndarray) -> np.ndarray:
    """Return 1 where the smoothed volume is above its threshold, else 0."""
    import torch
    from monai.networks.layers.simplelayers import GaussianFilter

    smoothed = GaussianFilter(volume.ndim, SMOOTHED)(torch.from_numpy(volume)[None, None])[0, 0].numpy()
    return np.where(smoothed > threshold(smoothed), HEAD, AIR)


def threshold(values: np.ndarray) -> float:
    """Return the threshold with the largest variance between the two classes (Otsu 1979)."""
    counts, edges = np.histogram(values, BINS)
    centres = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    above = below[-1] - below
    sums = np.cumsum(counts * centres)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    return float(edges[1:][np.nanargmax(between)])
