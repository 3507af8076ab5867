"""Segmentation of images and volumes by a U-Net (Ronneberger et al. 2015, arXiv:1505.04597), on MONAI.

Training sees random patches, validation and prediction whole scans by a sliding window. If `shard` of stage 3 has cut
the model into rows, each forward pass needs all ranks. A rank with fewer windows then adds empty ones.

Blocks have residual units (Zhang et al. 2017, arXiv:1711.10684). The loss is that of Dice (Milletari et al. 2016,
arXiv:1606.04797) and the cross-entropy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.random import Generator
from torch import Tensor, nn
from torch.utils.data import default_collate

from recipes.export import write_model
from recipes.scans import NO_LABEL, ExampleScans, Repeated, Sample, ScanFolder, check_installed, of_members
from trainer.annotated import check_arguments
from trainer.errors import ConfigError, require

FLIPPED = 0.5  # chance of a flip, along each axis
SCALE, SHIFT = 0.1, 0.1  # of the intensity, at most, in deviations


class Segmentation:
    """The recipe of a U-Net on scans with labels.

    Args:
        train: A folder of scans as `recipes.scans.ScanFolder` describes it, or tar shards; None: nibabel's example.
        val: The same for validation; None: the example's, if `train` is None, too. Else there is no validation, and
            `trainer.validate_every` must be null.
        dimensions: 2 or 3.
        classes: With the background, which is class 0.
        patches: Of each scan in an epoch; 1 with shards.
        patch: Elements of a training patch and of the sliding window, along each axis.
        channels: Of each level of the network, from the finest. Each level halves the patch.
        units: Residual units of a level.
        foreground: Share of the patches whose centre is not background.
        overlap: Share of a window that its neighbour covers too.
    """

    paths = ("train", "val")

    @check_arguments("recipe.")
    def __init__(
        self,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        dimensions: int = 2,
        inputs: int = 1,
        classes: int = 2,
        patches: int = 1,
        patch: list[int] | None = None,
        channels: list[int] | None = None,
        units: int = 2,
        foreground: float = 0.5,
        overlap: float = 0.25,
    ) -> None:
        check_installed()
        patch, channels = patch or [64] * dimensions, channels or [16, 32, 64, 128]
        if dimensions not in (2, 3):
            raise ConfigError(f"recipe.dimensions={dimensions}: must be 2 or 3")
        if len(patch) != dimensions or any(size % 2 ** (len(channels) - 1) for size in patch):
            levels = 2 ** (len(channels) - 1)
            raise ConfigError(
                f"recipe.patch={patch}: give {dimensions} multiples of {levels}, for {len(channels)} levels"
            )
        for key, value, least in (
            ("classes", classes, 2),
            ("inputs", inputs, 1),
            ("patches", patches, 1),
            ("units", units, 0),
        ):
            require(f"recipe.{key}", value, at_least=least)
        for key, value in (("foreground", foreground), ("overlap", overlap)):
            if not 0 <= value <= 1 - (key == "overlap") * 0.01:
                raise ConfigError(f"recipe.{key}={value}: must be from 0 to {'1' if key == 'foreground' else '0.99'}")
        self.sources, self.dimensions, self.inputs, self.classes = (
            {"train": train, "val": val},
            dimensions,
            inputs,
            classes,
        )
        if train is val is None:
            self._check_example()
        self.patch, self.channels, self.units = list(patch), list(channels), units
        self.patches, self.foreground, self.overlap = patches, foreground, overlap

    def model(self) -> nn.Module:
        from monai.networks.nets.unet import UNet

        return UNet(**self.network)

    @property
    def network(self) -> dict[str, Any]:
        """The arguments of MONAI's UNet."""
        sizes = {"spatial_dims": self.dimensions, "in_channels": self.inputs, "out_channels": self.classes}
        levels = {"channels": self.channels, "strides": [2] * (len(self.channels) - 1)}
        return sizes | levels | {"num_res_units": self.units}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the weights, and config.json: the arguments of MONAI's UNet and of its sliding window."""
        about = {"network": self.network, "patch": self.patch, "overlap": self.overlap}
        write_model(model, folder, about)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the levels' units, from the first of the encoder to the last of the decoder."""
        kinds = ("ResidualUnit", "Convolution")
        found = [module for module in model.modules() if type(module).__name__ in kinds]
        inner = {id(child) for module in found for child in module.modules() if child is not module}
        return [module for module in found if id(module) not in inner]

    def data(self, split: str) -> Any:
        source = self.sources[split]
        if source is None and self.sources["train"] is None:
            self._check_example()
            return self._repeated(ExampleScans(split, self.dimensions), split)
        if isinstance(source, str) and Path(source).is_dir():
            key, trains = f"recipe.{split}", split == "train"
            scans = ScanFolder(Path(source), self.dimensions, self.classes, key, self.inputs, labelled=trains)
            return self._repeated(scans, split)
        return source

    def _check_example(self) -> None:
        if (self.inputs, self.classes) != (1, 2):
            raise ConfigError("recipe.train=null: the example has inputs=1 and classes=2; give recipe.train")

    def _repeated(self, scans: ScanFolder | ExampleScans, split: str) -> Any:
        return Repeated(scans, self.patches) if split == "train" and self.patches > 1 else scans

    def val_transform(self, sample: Mapping[str, Any], rng: Generator) -> Sample:
        """Return the whole scan. Without a label, it is for `predict` alone."""
        own = dict(sample) if "image" in sample else of_members(sample, self.dimensions, self.classes)
        if len(own["image"]) != self.inputs:
            raise ConfigError(
                f"recipe.inputs={self.inputs}: a scan has {len(own['image'])} channel(s); set recipe.inputs"
            )
        return {name: own[name] for name in ("image", "label") if name in own}

    def transform(self, sample: Mapping[str, Any], rng: Generator) -> Sample:
        """Return a random patch, flipped at random, with another intensity."""
        own = self.val_transform(sample, rng)
        if "label" not in own:
            raise ConfigError(f"recipe.train: a scan has no label; {NO_LABEL}")
        image, label = cut(own["image"], own["label"], self.patch, rng.random() < self.foreground, rng)
        flipped = tuple(axis for axis in range(self.dimensions) if rng.random() < FLIPPED)
        image, label = np.flip(image, tuple(axis + 1 for axis in flipped)), np.flip(label, flipped)
        scale, shift = rng.uniform(1 - SCALE, 1 + SCALE), rng.uniform(-SHIFT, SHIFT)
        return {"image": (image * scale + shift).astype(np.float32), "label": label.copy()}

    def collate(self, samples: list[Sample]) -> dict[str, Any]:
        """Return a batch, with lists of tensors where the scans differ in size. If one has no label, none has."""
        names = [name for name in ("image", "label") if all(name in sample for sample in samples)]
        if len({sample["image"].shape for sample in samples}) == 1:
            return default_collate([{name: sample[name] for name in names} for sample in samples])
        return {name: [torch.from_numpy(sample[name]) for sample in samples] for name in names}

    def weight(self, batch: Mapping[str, Any]) -> int:
        return len(batch["image"])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return self._criterion(model(batch["image"]), batch["label"][:, None])

    @property
    def _criterion(self) -> nn.Module:
        from monai.losses.dice import DiceCELoss

        return DiceCELoss(include_background=False, to_onehot_y=True, softmax=True)

    def metrics(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, int]]:
        """Return the loss, and Dice of each class but the background, over the scans that have the class.

        Raises:
            ConfigError: A scan has no label.
        """
        from monai.metrics.meandice import compute_dice
        from monai.networks.utils import one_hot

        if "label" not in batch:
            raise ConfigError(f"recipe.val: a scan has no label; {NO_LABEL}")
        self._add_windows(model, batch["image"])
        losses: list[Tensor] = []
        dice: list[Tensor] = []
        for image, label in zip(batch["image"], batch["label"], strict=True):
            logits = self._logits(model, image)
            losses.append(self._criterion(logits, label[None, None]))
            found = [one_hot(each, self.classes) for each in (logits.argmax(1, keepdim=True), label[None, None])]
            dice.append(compute_dice(*found, include_background=False)[0])
        found = {f"dice_{number}": column for number, column in enumerate(torch.stack(dice).unbind(1), 1)}
        means = {name: (column.nansum(), int(column.isfinite().sum())) for name, column in found.items()}
        return {"loss": (torch.stack(losses).sum(), len(losses)), **means}

    def _logits(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return logits (1, classes, H, W[, D]) of an image (C, H, W[, D]) of any size, by a sliding window."""
        from monai.inferers.utils import sliding_window_inference

        found = sliding_window_inference(image[None], self.patch, 1, model, self.overlap, mode="gaussian")
        assert isinstance(found, Tensor)
        return found

    def _add_windows(self, model: nn.Module, images: Iterable[Tensor]) -> None:
        """Run empty windows if the model's rows are on several ranks, so that each makes as many. A collective then."""
        from torch.distributed.fsdp import FSDPModule

        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            return
        own, first = 0, None
        for image in images:
            own += self._windows(image.shape[1:])
            first = image if first is None else first
        assert first is not None
        dist.all_reduce(most := torch.tensor(own, device=first.device), dist.ReduceOp.MAX)
        for _ in range(int(most) - own):
            model(first.new_zeros(1, self.inputs, *self.patch))

    def _windows(self, sizes: Sequence[int]) -> int:
        """Return the number of windows of `_logits` for an image of these sizes."""
        steps = [max(1, int(side * (1 - self.overlap))) for side in self.patch]
        axes = zip(sizes, self.patch, steps, strict=True)
        return math.prod(1 + max(0, math.ceil((size - side) / step)) for size, side, step in axes)

    def predict(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor | list[Tensor]:
        """Return the class of each element; a list if the scans differ in size."""
        found = [self._logits(model, image).argmax(1).to(torch.uint8) for image in batch["image"]]
        return [each[0] for each in found] if isinstance(batch["image"], list) else torch.cat(found)


def cut(
    image: np.ndarray, label: np.ndarray, patch: Sequence[int], on_foreground: bool, rng: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return a random patch of an image (C, *S) and of its label (*S). A scan that is too small is padded.

    Args:
        on_foreground: The patch is centred on an element that is not background, as far as the scan's borders let it.
    """
    missing = [max(0, size - have) for size, have in zip(patch, label.shape, strict=True)]
    if any(missing):
        pads = [(each // 2, each - each // 2) for each in missing]
        image, label = np.pad(image, [(0, 0), *pads], mode="reflect"), np.pad(label, pads, mode="reflect")
    most = np.array(label.shape) - np.array(patch)
    start = rng.integers(0, most + 1)
    if on_foreground and (found := np.argwhere(label)).size:
        centre = found[rng.integers(len(found))]
        start = np.clip(centre - np.array(patch) // 2, 0, most)
    where = tuple(slice(first, first + size) for first, size in zip(start.tolist(), patch, strict=True))
    return image[(slice(None), *where)], label[where]
