"""The U-Net: patches keyed by the sample, Dice as MONAI counts it, scans of several sizes, training on real scans."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.cli import run
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks
from torch import nn

from recipes.scans import ExampleScans
from recipes.segmentation import Segmentation, cut
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.optim.groups import WithGroups
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = needs("monai")
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
    from monai.metrics.meandice import DiceMetric
    from monai.networks.utils import one_hot

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
    with torch.no_grad():
        found = recipe.predict(model, batch)
        each = [recipe.predict(model, recipe.collate([sample]))[0] for sample in samples]
    assert isinstance(found, list) and [one.shape for one in found] == [(24, 20), (8, 40)]
    assert all(torch.equal(one, other) for one, other in zip(found, each, strict=True))


class Counts(nn.Module):
    """Two logits of each element. Its calls are counted."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.repeat(1, 2, 1, 1)


@pytest.mark.parametrize("shape", [(16, 16), (5, 40), (17, 100), (128, 16)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.3, 0.99])
def test_windows_are_counted_before_they_run(shape: tuple[int, int], overlap: float) -> None:
    recipe, model = Segmentation(**SMALL, overlap=overlap), Counts()
    recipe.predict(model, recipe.collate([scan(*shape)]))
    assert model.calls == recipe._windows(shape)


def test_scans_without_labels_are_predicted_alone() -> None:
    recipe = Segmentation(**SMALL)
    model, samples = recipe.model().eval(), [scan(16, 16, seed=seed) for seed in range(2)]
    del samples[1]["label"]
    batch = recipe.collate([recipe.val_transform(sample, np.random.default_rng(0)) for sample in samples])
    assert batch.keys() == {"image"} and recipe.weight(batch) == 2
    with torch.no_grad():
        assert recipe.predict(model, batch).shape == (2, 16, 16)
    with refuses("recipe.val", "labels/NAME.nii.gz"):
        recipe.metrics(model, batch)
    with pytest.raises(ConfigError, match=r"^recipe\.train: a scan has no label; give labels/NAME\.nii\.gz, or"):
        recipe.transform(samples[1], np.random.default_rng(0))


def test_folders_of_others_take_the_place_of_the_examples_validation(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", image=np.zeros((20, 20)))
    recipe = Segmentation(**SMALL, val=str(tmp_path))
    assert isinstance(recipe.data("train"), ExampleScans) and recipe.data("val")[0].keys() == {"image"}
    with refuses("recipe.train=null", "inputs=1", "classes=2", "recipe.train"):
        Segmentation(**SMALL, val=str(tmp_path), classes=3).data("train")


def test_an_export_rebuilds_the_network(tmp_path: Path) -> None:
    from monai.networks.nets.unet import UNet

    recipe = Segmentation(**SMALL)
    model = recipe.model().eval()
    recipe.export(model, tmp_path / "export")
    about = json.loads((tmp_path / "export" / "config.json").read_text())
    again = UNet(**about["network"]).eval()
    again.load_state_dict(load_file(tmp_path / "export" / "model.safetensors"))
    x = torch.randn(1, 1, 16, 16)
    assert torch.equal(again(x), model(x)) and (about["patch"], about["overlap"]) == ([16, 16], 0.25)


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
        ({"classes": 3}, "recipe.train=null: the example has inputs=1 and classes=2"),
    ],
)
def test_a_mistake_is_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        Segmentation(**{**SMALL, **wrong})
    assert str(error.value).startswith(told)


def fit(place: Place, folder: str, name: str, sharded: bool) -> dict[str, float] | None:
    trainer = Trainer(
        Segmentation(f"{folder}/train", f"{folder}/val", **SMALL),
        {"shard": Shard(stage=3)} if sharded else {},
        WithGroups(partial(torch.optim.SGD, lr=0.1), []),
        batch=4,
        options=Options(max_steps=2, timeout_s=60.0, checkpoint=CheckpointOptions(every_steps=2)),
        data=DataOptions(workers=0),
        place=place,
        name=name,
    )
    trainer.fit()
    return trainer.validation


@pytest.mark.slow
def test_ranks_give_the_numbers_of_one_rank(tmp_path: Path) -> None:
    """The scans for validation have 1 and 36 windows. With `shard` of stage 3, each forward pass needs all ranks."""
    for split, sizes in (("train", [20, 24, 28, 32]), ("val", [16, 72])):
        (tmp_path / split).mkdir()
        for size in sizes:
            own = scan(size, size, seed=size)
            np.savez(tmp_path / split / f"{size}.npz", image=own["image"][0], label=own["label"])
    alone = fit(Place(), str(tmp_path), "alone", sharded=False)
    assert alone is not None and 0 < alone["val/dice_1"] < 1
    for sharded in (False, True):
        for found in run_ranks(2, fit, str(tmp_path), f"sharded{sharded}", sharded):
            assert found == pytest.approx(alone, rel=1e-4)


def train(folder: Path, *words: str) -> dict[str, Any]:
    done = run(
        [*words, "trainer.run_dir=run", "trainer.checkpoint.dir=ckpt", "~callbacks.tensorboard"], folder, timeout_s=280
    )
    assert done.code == 0, done.err
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bound"), [("unet_2d", 0.95), ("unet_3d", 0.95)])
def test_dice_on_the_example(tmp_path: Path, name: str, bound: float) -> None:
    assert train(tmp_path, f"recipe={name}")["val/dice_1"] > bound
