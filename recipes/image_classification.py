"""Classification of images by a ResNet, from shards or from a folder per class.

The values of resnet50 are those of Goyal et al. 2017, arXiv:1706.02677. Half a cosine takes the place of their steps
(Loshchilov and Hutter 2016, arXiv:1608.03983). Label smoothing is from Szegedy et al. 2015, arXiv:1512.00567.
"""

import importlib.util
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor, nn
from torch.utils.data import default_collate

from recipes import digits
from recipes.checks import check
from recipes.export import write_model
from recipes.images import ImageFolder, normalise
from recipes.resnet import ResNet
from trainer.annotated import check_arguments
from trainer.data.images import DEVIATION, MEAN, LazyJpeg, augment, check_simplejpeg, crop_middle, image_of
from trainer.data.shards.classes import CLASSES, read_classes
from trainer.errors import ConfigError, require

NO_NAMES = f"no {CLASSES} has the names of the classes"
PACK = "pack both by echelon shards pack --classes, into one folder"


class ImageClassification:
    """The recipe of a ResNet on images with a class each.

    Weight decay is for matrices alone, as in every optimizer of Echelon: BatchNorm and biases have none.

    Args:
        train: A folder with a folder per class, or tar shards whose samples have an image and `cls`. None: the digits
            of recipes/digits.py.
        val: The same for validation; None: the digits', if `train` is None, too. Else there is no validation, and
            `trainer.validate_every` must be null.
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

    @check_arguments("recipe.")
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
            raise ConfigError("recipe: needs pillow; pip install 'pillow>=11'")
        layers = [3, 4, 6, 3] if layers is None else list(layers)
        for key, value, least in (("classes", classes, 2), ("width", width, 1), ("image", image, 1)):
            require(f"recipe.{key}", value, at_least=least)
        require("recipe.val_resize", val_resize, at_least=image)
        check(bool(layers) and min(layers) >= 1, f"recipe.layers={layers}: give one block or more for each stage")
        check(0 < crop <= 1, f"recipe.crop={crop}: must be above 0, and at most 1")
        require("recipe.label_smoothing", label_smoothing, at_least=0, below=1)
        self.sources, self.classes = {"train": train, "val": val}, classes
        self.decoders: list[LazyJpeg] = []
        if train is val is None:
            self._check_digits()
        else:
            check_simplejpeg("recipe")
            self.decoders.append(LazyJpeg())
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
        check(split in self.sources, f"recipe.data: there is no split={split}; give train or val")
        source = self.sources[split]
        if source is None and self.sources["train"] is None:
            self._check_digits()
            return digits.shards(split)
        if split == "train":
            return self._train_images or self._checked_names(source)
        if not isinstance(source, str) or not Path(source).is_dir():
            return self._checked_names(source)
        numbers = self.sources["train"] is None  # the classes of the digits
        known = self.labels if numbers else self._known_names
        images = ImageFolder(Path(source), known, "recipe.val", labelled=False, decoders=self.decoders)
        check(known is not None or not images.labelled, f"recipe.val={source}: {NO_NAMES} of recipe.train; {PACK}")
        return images

    def _check_digits(self) -> None:
        check(self.classes == 10, "recipe.train=null: the digits have classes=10; set it, or give recipe.train")

    @cached_property
    def _train_images(self) -> ImageFolder | None:
        source = self.sources["train"]
        if not isinstance(source, str) or not Path(source).is_dir():
            return None
        found = ImageFolder(Path(source), decoders=self.decoders)
        self._check_number(len(found.classes), f"recipe.train={source} has {len(found.classes)} folders")
        return found

    def _check_number(self, names: int, has: str) -> None:
        check(names == self.classes, f"recipe.classes={self.classes}: {has}; set recipe.classes={names}")

    def _checked_names(self, source: Any) -> Any:
        """Return shards, after checking that the names next to them match the classes and the training names.

        Raises:
            ConfigError: The names differ, or training reads a folder and these shards have no names to confirm its own.
        """
        own, known = names_beside(source), self._known_names
        if own is not None:
            self._check_number(len(own), f"{CLASSES} next to {source} has {len(own)} names")
        if source is self.sources["train"] or source is None or own == known:
            return source
        if self._train_images:
            check(own is not None, f"recipe.val={source}: {NO_NAMES}; {PACK}")
        check(None in (own, known), f"recipe.val={source}: {CLASSES} has other names than recipe.train; {PACK}")
        return source

    @cached_property
    def _known_names(self) -> list[str] | None:
        if self._train_images:
            return self._train_images.classes
        return names_beside(self.sources["train"])

    @property
    def labels(self) -> list[str]:
        """The names of the classes: the folders of `train`, or classes.json next to the shards, or numbers."""
        return self._known_names or [str(i) for i in range(self.classes)]

    def transform(self, sample: Mapping[str, Any], rng: Generator) -> dict[str, Any]:
        """Return `image`, a random crop (H, W, 3) of bytes, and `label`."""
        made = augment(image_of(sample)[1], self.image, self.crop, self.flip, rng)
        return {"image": made, "label": self._label(sample)}

    def val_transform(self, sample: Mapping[str, Any], rng: Generator) -> dict[str, Any]:
        """Return the middle of the image in place of a random crop. Without a class, it is for `predict` alone."""
        made = crop_middle(image_of(sample)[1], self.image, self.val_resize)
        return {"image": made} | ({"label": self._label(sample)} if "cls" in sample else {})

    def _label(self, sample: Mapping[str, Any]) -> int:
        label = sample.get("cls")
        if not isinstance(label, int) or not 0 <= label < self.classes:
            has = "no cls" if label is None else f"cls={label}"
            raise ConfigError(
                f"recipe.classes={self.classes}: a sample has {has}; give each sample a cls of 0 to {self.classes - 1}"
            )
        return label

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return a batch. If one image has no label, none has."""
        names = [name for name in ("image", "label") if all(name in sample for sample in samples)]
        return default_collate([{name: sample[name] for name in names} for sample in samples])

    def _logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return logits (B, classes) of images (B, H, W, 3)."""
        return model(normalise(batch["image"], self.channels_last))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(self._logits(model, batch), batch["label"], label_smoothing=self.label_smoothing)

    def metrics(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        """Return the loss without smoothing, the accuracy, and with more than 5 classes that of the first 5 guesses.

        Raises:
            ConfigError: An image has no class.
        """
        has_all = "label" in batch
        check(has_all, "recipe.val: an image has no class; give a folder per class; echelon predict needs none")
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
        seen = {"image": self.image, "val_resize": self.val_resize, "mean": MEAN, "deviation": DEVIATION}
        write_model(model, folder, {"network": self.network, **seen, "labels": self.labels})

    @cached_property
    def flops_per_sample(self) -> float:
        """Operations of convolutions and of the classifier, forward and backward, as torch counts them."""
        from torch.utils.flop_counter import FlopCounterMode

        with torch.device("meta"):
            model, image = ResNet(**self.network), torch.empty(1, 3, self.image, self.image)
        with FlopCounterMode(display=False) as counter:
            model(image).sum().backward()
        return float(counter.get_total_flops())


def names_beside(source: str | list[str] | None) -> list[str] | None:
    """Return the class names stored next to shards; None if no file has them.

    Raises:
        ConfigError: Files in several folders have different names.
    """
    sources = [source] if isinstance(source, str) else source or []
    files = dict.fromkeys(Path(each).parent / CLASSES for each in sources)
    found = {str(file): read_classes(file) for file in files if file.is_file()}
    first = next(iter(found.values()), None)
    for file, names in found.items():
        check(names == first, f"{file}: has other names than {next(iter(found))}; {PACK}")
    return first
