"""Scans with labels for segmentation: NIfTI or NPZ files in folders, members of shards, and the scans of nibabel.

An image is (H, W) or (H, W, D), or has its channels last; a label has a class for each element. Intensities become mean
0 and deviation 1 in each scan and channel. A slice has the mean and the deviation of its scan. A slice in a shard has
its own, since its scan is not there. The size of an element in millimetres is not read: resample scans before that
differ in it.
"""

import functools
import gzip
import hashlib
import importlib.util
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainer.data.shards.decoders import undecodable
from trainer.errors import EXIT_CODES, ConfigError, DataError
from trainer.files import is_hidden

NIFTI = (".nii.gz", ".nii")
INSTALL = "pip install 'monai>=1.5,<2' 'nibabel>=5,<6'"
OPEN_SCANS = 8  # that a data worker keeps decoded
EXAMPLE = "example4d.nii.gz"  # of nibabel: two volumes of a head, 128 x 96 x 24, by echo-planar imaging
EVERY = 4  # slices of nibabel's scan, of which the last is for validation
AIR, HEAD = 0, 1  # classes of nibabel's scan
BINS = 256  # of the histogram for a threshold
SMOOTHED = 2.0  # elements: the deviation of the filter before the threshold

NO_LABEL = "give labels/NAME.nii.gz, or an NPZ with label; echelon predict needs none"

Sample = dict[str, np.ndarray]  # image (C, H, W[, D]) in float32, label (H, W[, D]) in int64 if there is one
Moments = tuple[np.ndarray, np.ndarray]  # mean and deviation of each channel


def check_installed() -> None:
    """Refuse a recipe of scans where MONAI or nibabel is missing."""
    for name in ("monai", "nibabel"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"recipe: needs {name}; {INSTALL}")


def moments(image: np.ndarray, dimensions: int) -> Moments:
    """Return the mean and the deviation over the first `dimensions` axes; no deviation is 0."""
    image, axes = np.ascontiguousarray(image), tuple(range(dimensions))  # one order of sums for all files
    return image.mean(axes), np.maximum(image.std(axes), 1e-6)


def make_sample(
    image: np.ndarray, label: np.ndarray | None, dimensions: int, classes: int, place: str, whole: Moments | None = None
) -> Sample:
    """Return image and label as the model takes them.

    Args:
        label: None: there is none, and the sample has none.
        whole: Of the scan that a slice is from; None: the image is the scan.

    Raises:
        ConfigError: They have another number of dimensions, or the label has a class that there is not.
        DataError: Their shapes differ.
    """
    image = np.asarray(image, np.float32)
    if image.ndim == dimensions:
        image = image[..., None]
    own = image.ndim - 1 if label is None else np.ndim(label)
    if own != dimensions:
        way_out = f"set recipe.dimensions={own}" if own in (2, 3) else "give scans of 2 or 3"
        raise ConfigError(f"recipe.dimensions={dimensions}: {place} has {own}; {way_out}")
    made = {} if label is None else {"label": classified(image, label, classes, place)}
    mean, deviation = whole or moments(image, dimensions)
    return made | {"image": np.ascontiguousarray(np.moveaxis((image - mean) / deviation, -1, 0), np.float32)}


def classified(image: np.ndarray, label: np.ndarray, classes: int, place: str) -> np.ndarray:
    """Return the class of each element of an image (*S, C).

    Raises:
        ConfigError, DataError: As in `make_sample`.
    """
    if image.shape[:-1] != label.shape:
        raise DataError(f"{place}: image {image.shape[:-1]} and label {label.shape} differ; write one again")
    found = np.rint(label).astype(np.int64)
    least, most = int(found.min()), int(found.max())
    if least < 0 or most >= classes:
        way_out = f"set recipe.classes={most + 1}" if least >= 0 else "write labels whose first class is 0"
        raise ConfigError(f"recipe.classes={classes}: the label of {place} has classes {least} to {most}; {way_out}")
    return found


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
        raise undecodable(error, place) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a DataError for a damaged file, and an UnavailableError for one that can't be read now."""
    try:
        path.stat()  # nibabel's own error of a missing file has no number
        yield
    except (*EXIT_CODES, MemoryError):
        raise
    except Exception as error:  # NumPy and nibabel may raise anything
        raise undecodable(error, path) from error


def values_of(path: Path) -> Any:
    """Return the values of a NIfTI file. Those of an uncompressed one stay in the file until they are indexed."""
    import nibabel

    if path.name.endswith(".gz"):
        return decode(path.read_bytes(), str(path))
    return nibabel.load(path).dataobj  # pyright: ignore[reportAttributeAccessIssue] of any of its kinds


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of an NPZ file, by name. Their headers alone are read."""
    found: dict[str, tuple[int, ...]] = {}
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            with file.open(name) as member:
                first = np.lib.format.read_magic(member) == (1, 0)
                header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                found[name.removesuffix(".npy")] = header(member)[0]
    return found


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
    if "image" not in values:
        has = ", ".join(name for name in sample if not name.startswith("__"))
        raise ConfigError(f"recipe.train: a sample has {has}; give image.nii.gz and label.nii.gz, or an npz of both")
    return make_sample(values["image"], values.get("label"), dimensions, classes, place)


class ScanFolder(Dataset[Sample]):
    """The scans of a folder, in the order of their names. 2-D samples of 3-D scans are their slices.

    There are `images/NAME.nii.gz` and `labels/NAME.nii.gz`, as in the Medical Segmentation Decathlon (Antonelli et al.
    2022, arXiv:2106.05735), or `NAME.npz` with `image` and `label`. The start reads headers alone. A damaged scan is
    one sample, which can't be read.

    Args:
        inputs: Channels of an image.
        key: The setting that named the folder, for errors.
        labelled: False: a folder without `labels`, and an NPZ without `label`, are taken, too.

    Raises:
        ConfigError: There is no scan, or one has no label.
    """

    def __init__(
        self, root: Path, dimensions: int, classes: int, key: str, inputs: int = 1, labelled: bool = True
    ) -> None:
        self.dimensions, self.classes, self.inputs = dimensions, classes, inputs
        scans = [path for path in sorted([*root.glob("images/*"), *root.glob("*.npz")]) if not is_hidden(path.name)]
        nifti = [path for path in scans if path.parent != root and path.name.endswith(NIFTI)]
        self.files = nifti or [path for path in scans if path.parent == root]
        if not self.files:
            raise ConfigError(f"{key}={root}: has no images/NAME.nii.gz and no NAME.npz; give a folder that has")
        self.labels = [root / "labels" / path.name for path in nifti if labelled or (root / "labels").is_dir()]
        if missing := [path.name for path in self.labels if not path.is_file()]:
            raise ConfigError(f"{key}={root}: labels/{missing[0]} is missing; give each image a label of its name")
        self.required = f"{key}={root}" if labelled else ""
        self.read = functools.lru_cache(OPEN_SCANS)(self._read)
        self.moments = functools.cache(self._moments)
        self.slices = [(i, z) for i in range(len(self.files)) for z in self._slices(i)]
        sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in (*self.files, *self.labels)]
        self.fingerprint = hashlib.sha256(repr([sizes, dimensions, classes]).encode()).hexdigest()

    def _slices(self, i: int) -> Sequence[int | None]:
        """Return the numbers of a scan's slices; None alone stands for a whole scan."""
        try:
            shape = self._shape(i)
        except DataError:
            return [None]  # it is damaged, as its reader will find
        return range(shape[2]) if len(shape) == 3 and self.dimensions == 2 else [None]

    def _shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of a scan without its channels, from a header."""
        import nibabel

        path = self.labels[i] if self.labels else self.files[i]
        with reading(path):
            if path.suffix == ".npz":
                found = shapes_of(path)
                if self.required and "image" in found and "label" not in found:
                    raise ConfigError(f"{self.required}: {path.name} has no array label; {NO_LABEL}")
                if "label" in found:
                    return found["label"]
                image = found["image"]
            else:
                image = tuple(nibabel.load(path).shape)  # pyright: ignore[reportAttributeAccessIssue] of any kind
        return image[:-1] if not self.labels and (self.inputs > 1 or len(image) > 3) else image

    def _read(self, i: int) -> tuple[Any, Any]:
        """Return the values of an image and of its label, or None."""
        path = self.files[i]
        with reading(path):
            if path.suffix != ".npz":
                return values_of(path), values_of(self.labels[i]) if self.labels else None
            with np.load(path, allow_pickle=False) as values:
                found = {name: values[name] for name in ("image", "label") if name in values}
        if "image" not in found:
            raise DataError(f"{path}: has no array image; write it again or remove it")
        return found["image"], found.get("label")

    def _moments(self, i: int) -> Moments:
        """Return those of the volume (H, W, D[, C]) whose slices are samples."""
        return moments(np.asarray(self.read(i)[0], np.float32), 3)

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, i: int) -> Sample:
        """Return image and label.

        Raises:
            ConfigError: As in `make_sample`.
            DataError: A file is damaged.
            UnavailableError: A file can't be read now.
        """
        number, z = self.slices[i]
        path, whole = self.files[number], None
        image, label = self.read(number)
        with reading(path):
            if z is not None:
                if label is not None and image.shape[:3] != label.shape:
                    raise DataError(f"{path}: image {image.shape[:3]} and label {label.shape} differ; write one again")
                whole = self.moments(number)
                image, label = image[:, :, z], None if label is None else label[:, :, z]
            image, label = np.asarray(image), None if label is None else np.asarray(label)
        return make_sample(image, label, self.dimensions, self.classes, str(path), whole)


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
            pairs = [(volume, label, None) for volume, label in zip(volumes[:, half], labels[:, half], strict=True)]
        else:
            chosen = [z for z in range(volumes.shape[-1]) if (z % EVERY == EVERY - 1) == (split == "val")]
            pairs = [
                (volume[..., z], label[..., z], moments(volume, 3))
                for volume, label in zip(volumes, labels, strict=True)
                for z in chosen
            ]
        self.samples = [make_sample(image, label, dimensions, 2, EXAMPLE, whole) for image, label, whole in pairs]
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
