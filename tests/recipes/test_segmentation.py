"""The U-Net: patches keyed by the sample, Dice as MONAI counts it, scans of several sizes, training on real scans."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import run

pytest.importorskip("monai")

from monai.metrics.meandice import DiceMetric
from monai.networks.utils import one_hot

from recipes.segmentation import Segmentation, cut
from trainer.errors import ConfigError

SMALL: dict[str, Any] = {"patch": [16, 16], "channels": [4, 8]}


def scan(*shape: int, seed: int = 0) -> dict[str, np.ndarray]:
    image = np.random.default_rng(seed).normal(size=(1, *shape)).astype(np.float32)
    return {"image": image, "label": (image[0] > 0.5).astype(np.int64)}


def test_a_patch_is_of_its_size_and_keyed() -> None:
    recipe = Segmentation(**SMALL)
    one, same, other = (recipe.transform(scan(40, 30), np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one["image"].shape == (1, 16, 16) and one["label"].shape == (16, 16)
    assert (one["image"] == same["image"]).all() and not np.array_equal(one["image"], other["image"])


def test_image_and_label_stay_together() -> None:
    """The label is where the image is above a bound: also after cuts, flips and other intensities."""
    recipe = Segmentation(**SMALL)
    for seed in range(20):
        made = recipe.transform(scan(40, 30, seed=seed), np.random.default_rng(seed))
        inside, outside = (made["image"][0][made["label"] == number] for number in (1, 0))
        assert not inside.size or inside.min() > outside.max()


def test_validation_sees_the_whole_scan() -> None:
    own = scan(40, 30)
    made = Segmentation(**SMALL).val_transform(own, np.random.default_rng(0))
    assert (made["image"] == own["image"]).all() and (made["label"] == own["label"]).all()


def test_a_patch_on_the_foreground_has_some() -> None:
    label = np.zeros((64, 64), np.int64)
    label[60, 3] = 1
    rng = np.random.default_rng(0)
    assert all(cut(label[None], label, [16, 16], True, rng)[1].any() for _ in range(20))
    assert not all(cut(label[None], label, [16, 16], False, rng)[1].any() for _ in range(20))


@pytest.mark.parametrize("shape", [(5, 40), (1, 1), (16, 16)])
def test_a_scan_smaller_than_the_patch_is_padded(shape: tuple[int, int]) -> None:
    own = scan(*shape)
    image, label = cut(own["image"], own["label"], [16, 16], True, np.random.default_rng(0))
    assert image.shape == (1, 16, 16) and label.shape == (16, 16)


def test_dice_is_monais() -> None:
    torch.manual_seed(0)
    recipe = Segmentation(**SMALL, classes=3, train="x")
    model = recipe.model().eval()
    samples = [scan(24, 20, seed=seed) for seed in range(3)]
    samples[0]["label"][4:9] = 2  # the others lack class 2
    batch = recipe.collate(samples)
    with torch.no_grad():
        found, labels = recipe.metrics(model, batch), recipe.predict(model, batch)
    metric = DiceMetric(include_background=False, reduction="none")
    expected = metric(one_hot(labels[:, None], 3), one_hot(batch["label"][:, None], 3))
    assert found["dice_1"][0] == pytest.approx(float(expected[:, 0].sum())) and found["dice_1"][1] == 3
    assert found["dice_2"][0] == pytest.approx(float(expected[0, 1])) and found["dice_2"][1] == 1


def test_scans_of_several_sizes() -> None:
    recipe = Segmentation(**SMALL)
    model = recipe.model().eval()
    samples = [scan(24, 20), scan(8, 40)]
    batch = recipe.collate(samples)
    assert isinstance(batch["image"], list) and recipe.weight(batch) == 2
    with torch.no_grad():
        together = recipe.metrics(model, batch)
        alone = [recipe.metrics(model, recipe.collate([sample])) for sample in samples]
    assert together["dice_1"][0] == pytest.approx(sum(float(each["dice_1"][0]) for each in alone))
    with pytest.raises(ConfigError, match="predict each size alone"):
        recipe.predict(model, batch)


def test_the_loss_is_a_mean_over_samples() -> None:
    torch.manual_seed(0)
    recipe = Segmentation(**SMALL)
    model = recipe.model()
    samples = [scan(16, 16, seed=seed) for seed in range(4)]
    whole = recipe.loss(model, recipe.collate(samples))
    parts = [recipe.loss(model, recipe.collate([sample])) for sample in samples]
    assert float(whole.detach()) == pytest.approx(float(torch.stack(parts).mean().detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"dimensions": 4}, "recipe.dimensions=4: must be 2 or 3"),
        ({"patch": [16, 15]}, "recipe.patch=[16, 15]: give 2 multiples of 2"),
        ({"overlap": 1.0}, "recipe.overlap=1.0: must be from 0 to 0.99"),
        ({"classes": 3}, "recipe.train=null: the example has inputs=1, classes=2"),
    ],
)
def test_a_mistake_is_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        Segmentation(**{**SMALL, **wrong})
    assert str(error.value).startswith(told)


def train(folder: Path, *words: str) -> dict[str, Any]:
    done = run(
        [*words, "trainer.run_dir=run", "trainer.checkpoint.dir=ckpt", "~callbacks.tensorboard"], folder, timeout_s=280
    )
    assert done.code == 0, done.err
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.slow
def test_a_few_steps_on_two_ranks(tmp_path: Path) -> None:
    found = train(
        tmp_path, "recipe=unet_3d", "trainer.devices=2", "trainer.max_steps=3", "batch=4", "data.workers=0",
        "recipe.channels=[4,8]", "recipe.patch=[16,16,8]", "trainer.validate_every=null",
    )  # fmt: skip
    assert 0 <= found["val/dice_1"] <= 1 and found["val/loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bound"), [("unet_2d", 0.95), ("unet_3d", 0.95)])
def test_dice_on_the_example(tmp_path: Path, name: str, bound: float) -> None:
    assert train(tmp_path, f"recipe={name}")["val/dice_1"] > bound
