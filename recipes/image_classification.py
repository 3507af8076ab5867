"""Classification of images by a ResNet, from shards or from a folder per class.

The values of resnet50 are those of Goyal et al. 2017, arXiv:1706.02677. Half a cosine takes the place of their steps
(Loshchilov and Hutter 2016, arXiv:1608.03983). Label smoothing is from Szegedy et al. 2015, arXiv:1512.00567.
"""

import importlib.util
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes import digits
from recipes.images import DEVIATION, MEAN, ImageFolder, augment, crop_middle, image_of, normalise
from recipes.resnet import ResNet
from trainer.data.shards.classes import CLASSES, read_classes
from trainer.errors import ConfigError, require


class ImageClassification:
    """The recipe of a ResNet on images with a class each.

    Weight decay is for matrices alone, as in every optimizer of Echelon: BatchNorm and biases have none.

    Args:
        train: A folder with a folder per class, or tar shards whose samples have an image and `cls`. None: the digits
            of recipes/digits.py.
        val: The same for validation; None: no validation, but for the digits.
        classes: The number of classes.
        layers: Blocks of each stage, as in recipes/resnet.py; so are `width` and `small_stem`.
        image: Pixels of a side, as the model sees it.
        val_resize: Pixels of the shorter side for validation, of which the middle `image` pixels are taken.
        crop: The smallest share of an image's area that a random crop has; 1: no random crops.
        flip: Training images are mirrored at random.
        label_smoothing: Share of the target that all classes have alike.
        channels_last: Memory format of weights and images, which is faster on GPUs with tensor cores.
    """

    paths = ("train", "val")

    def __init__(
        self,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        classes: int = 1000,
        layers: list[int] | None = None,
        width: int = 64,
        small_stem: bool = False,
        image: int = 224,
        val_resize: int = 256,
        crop: float = 0.08,
        flip: bool = True,
        label_smoothing: float = 0.1,
        channels_last: bool = True,
    ) -> None:
        if not importlib.util.find_spec("PIL"):
            raise ConfigError("recipe: needs pillow; pip install 'echelon-trainer[vision]'")
        layers = [3, 4, 6, 3] if layers is None else list(layers)
        for key, value, least in (("classes", classes, 2), ("width", width, 1), ("image", image, 1)):
            require(f"recipe.{key}", value, at_least=least)
        require("recipe.val_resize", val_resize, at_least=image)
        _check(bool(layers) and min(layers) >= 1, f"recipe.layers={layers}: give one block or more for each stage")
        _check(0 < crop <= 1, f"recipe.crop={crop}: must be above 0, and at most 1")
        require("recipe.label_smoothing", label_smoothing, at_least=0, below=1)
        _check(
            train is not None or (classes == 10 and val is None),
            "recipe.train=null: the digits have classes=10 and a validation split; set recipe.classes=10 and "
            "recipe.val=null, or give recipe.train",
        )
        self.sources, self.classes = {"train": train, "val": val}, classes
        self.network = {"classes": classes, "layers": layers, "width": width, "small_stem": small_stem}
        self.image, self.val_resize, self.crop, self.flip = image, val_resize, crop, flip
        self.label_smoothing, self.channels_last = label_smoothing, channels_last

    def model(self) -> ResNet:
        made = ResNet(**self.network)
        return made.to(memory_format=torch.channels_last) if self.channels_last else made  # pyright: ignore[reportCallIssue] torch documents it

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, ResNet)
        return model.blocks()

    def data(self, split: str) -> Any:
        if self.sources["train"] is None:
            return digits.shards(split)
        _check(split in self.sources, f"recipe.data: there is no split={split}; give train or val")
        source = self.sources[split]
        if not isinstance(source, str) or not Path(source).is_dir():
            return source
        if split == "train":
            return self._train_images
        return ImageFolder(Path(source), self.labels if self._train_images else None, "recipe.val")

    @cached_property
    def _train_images(self) -> ImageFolder | None:
        source = self.sources["train"]
        if not isinstance(source, str) or not Path(source).is_dir():
            return None
        found = ImageFolder(Path(source))
        folders = len(found.classes)
        _check(
            folders == self.classes,
            f"recipe.classes={self.classes}: recipe.train={source} has {folders} folders; set recipe.classes={folders}",
        )
        return found

    @cached_property
    def labels(self) -> list[str]:
        """The names of the classes: the folders of `train`, or classes.json beside the shards, or numbers."""
        if self._train_images:
            return self._train_images.classes
        source = self.sources["train"] or ""
        file = Path(source if isinstance(source, str) else source[0]).parent / CLASSES
        return read_classes(file) if source and file.is_file() else [str(i) for i in range(self.classes)]

    def transform(self, sample: Mapping[str, Any], rng: Generator) -> dict[str, Any]:
        """Return `image`, a random crop (H, W, 3) of bytes, and `label`."""
        return self._labelled(sample, augment(image_of(sample), self.image, self.crop, self.flip, rng))

    def val_transform(self, sample: Mapping[str, Any], rng: Generator) -> dict[str, Any]:
        """Return the middle of the image in place of a random crop."""
        return self._labelled(sample, crop_middle(image_of(sample), self.image, self.val_resize))

    def _labelled(self, sample: Mapping[str, Any], image: np.ndarray) -> dict[str, Any]:
        label = sample.get("cls")
        if not isinstance(label, int) or not 0 <= label < self.classes:
            has = "no cls" if label is None else f"cls={label}"
            raise ConfigError(
                f"recipe.classes={self.classes}: a sample has {has}; give each sample a cls of 0 to {self.classes - 1}"
            )
        return {"image": image, "label": label}

    def _logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B, classes) of images (B, H, W, 3)."""
        return model(normalise(batch["image"], self.channels_last))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(self._logits(model, batch), batch["label"], label_smoothing=self.label_smoothing)

    def metrics(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        """Return the loss without smoothing, the accuracy, and with more than 5 classes that of the first 5 guesses."""
        logits, labels = self._logits(model, batch), batch["label"]
        found = {
            "loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
            "accuracy": ((logits.argmax(-1) == labels).sum(), len(labels)),
        }
        if self.classes > 5:
            best = logits.topk(5).indices
            found["top5"] = ((best == labels[:, None]).sum(), len(labels))
        return found

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the number of the likeliest class, and its probability."""
        probability, number = self._logits(model, batch).float().softmax(-1).max(-1)
        return {"class": number, "probability": probability}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the weights, and config.json: the network's arguments, its input and the names of the classes."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        seen = {"image": self.image, "val_resize": self.val_resize, "mean": MEAN, "deviation": DEVIATION}
        about = {"network": self.network, **seen, "labels": self.labels}
        (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")

    @cached_property
    def flops_per_sample(self) -> float:
        """Operations of convolutions and of the classifier, forward and backward, as torch counts them."""
        from torch.utils.flop_counter import FlopCounterMode

        with torch.device("meta"):
            model, image = ResNet(**self.network), torch.empty(1, 3, self.image, self.image)
        with FlopCounterMode(display=False) as counter:
            model(image).sum().backward()
        return float(counter.get_total_flops())


def _check(fine: bool, message: str) -> None:
    if not fine:
        raise ConfigError(message)
