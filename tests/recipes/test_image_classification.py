"""The recipe of a ResNet on images: its numbers by hand, its data, its presets, and runs on scikit-learn's digits."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from safetensors.torch import load_file
from support.cli import QUICK, run
from support.messages import refuses
from torch import nn

from recipes import digits
from recipes.image_classification import ImageClassification
from recipes.images import ImageFolder
from recipes.resnet import ResNet
from trainer.checkpoint.pretrained import load_weights
from trainer.data.images import Jpeg
from trainer.data.opening import open_source
from trainer.data.sampling.order import Ref, Refs
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError
from trainer.optim.groups import parameter_groups

CONF = Path(__file__).parents[2] / "conf"
SMALL: dict[str, Any] = {"layers": [1, 1], "width": 4, "small_stem": True, "image": 8, "val_resize": 8}
OVERRIDES = [f"recipe.{key}={value}".replace(" ", "").replace("True", "true") for key, value in SMALL.items()]


class Logits(nn.Module):
    """Logits of its own, whatever the images are."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1:] == (3, 8, 8) and x.dtype == torch.float32
        return self.logits


def batch_of(labels: list[int]) -> dict[str, torch.Tensor]:
    return {"image": torch.zeros(len(labels), 8, 8, 3, dtype=torch.uint8), "label": torch.tensor(labels)}


def test_the_loss_is_smoothed_and_the_metric_is_not():
    recipe = ImageClassification("shards", classes=3, label_smoothing=0.3, **SMALL)
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
    model, batch = Logits(logits), batch_of([0, 1])
    logs = np.log(np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True))
    plain = -(logs[0, 0] + logs[1, 1])
    smoothed = -(0.7 * (logs[0, 0] + logs[1, 1]) + 0.1 * logs.sum()) / 2
    assert recipe.loss(model, batch).item() == pytest.approx(smoothed, rel=1e-6)
    metrics = recipe.metrics(model, batch)
    assert {name: (total.item(), count) for name, (total, count) in metrics.items()} == {
        "loss": (pytest.approx(plain, rel=1e-6), 2),
        "accuracy": (1.0, 2),
    }
    found = recipe.predict(model, batch)
    assert found["class"].tolist() == [0, 2]
    assert found["probability"].tolist() == pytest.approx([math.exp(logs[0, 0]), math.exp(logs[1, 2])], rel=1e-6)


def test_with_more_than_five_classes_the_first_five_guesses_count():
    recipe = ImageClassification("shards", classes=6, **SMALL)
    model = Logits(torch.tensor([[6.0, 5, 4, 3, 2, 1]] * 3))
    found = {name: total.item() for name, (total, _) in recipe.metrics(model, batch_of([0, 4, 5])).items()}
    loss = 9 + 3 * math.log(sum(map(math.exp, range(-5, 1))))
    assert found == {"loss": pytest.approx(loss), "accuracy": 1.0, "top5": 2.0}


def test_batch_norm_and_biases_have_no_weight_decay():
    with torch.device("meta"):
        model = ImageClassification("shards").model()
    decayed, others = parameter_groups(model)
    assert "weight_decay" not in decayed and others["weight_decay"] == 0.0
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert {id(p) for p in decayed["params"]} == matrices and len(matrices) == 54
    assert len(others["params"]) == 161 - 54


def test_the_memory_format():
    for channels_last in (True, False):
        model = ImageClassification("shards", channels_last=channels_last, **SMALL).model()
        assert model.layer1[0].conv2.weight.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_flops_are_those_of_the_convolutions_and_the_classifier():
    """Forward twice the 4.09e9 products that torchvision's documentation has; backward twice that, but for the first
    layer, which passes nothing on."""
    recipe = ImageClassification("shards")
    forward = 2 * 4.089e9
    first = 2 * 112 * 112 * 64 * 3 * 7 * 7
    assert recipe.flops_per_sample == pytest.approx(3 * forward - first, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"train": None},
            "recipe.train=null: the digits have classes=10; set it, or give recipe.train",
        ),
        ({"classes": 1}, "recipe.classes=1: must be at least 2"),
        ({"layers": [2, 0]}, "recipe.layers=[2, 0]: give one block or more for each stage"),
        ({"val_resize": 100}, "recipe.val_resize=100: must be at least 224"),
        ({"crop": 0}, "recipe.crop=0: must be above 0, and at most 1"),
        ({"label_smoothing": 1.0}, "recipe.label_smoothing=1.0: must be less than 1"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        ImageClassification(**{"train": "shards", **arguments})


def test_without_pillow(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses("recipe", "'pillow>=11'"):
        ImageClassification("shards")


def test_without_simplejpeg(monkeypatch):
    """The digits are PNGs, so they need none."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "simplejpeg" else name)
    with refuses("recipe", "'simplejpeg>=1.8,<2'"):
        ImageClassification("shards")
    assert not ImageClassification(classes=10).decoders


def test_jpegs_of_shards_and_folders_stay_compressed_until_the_crop(tmp_path):
    """And both give Pillow's crops, to within 1."""
    image = Image.radial_gradient("L").resize((60, 40)).convert("RGB")
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "b").mkdir()
    image.save(tmp_path / "train" / "a" / "0.jpg", quality=95)
    content = (tmp_path / "train" / "a" / "0.jpg").read_bytes()
    write_shards([{"__key__": "0", "jpg": content, "cls": 0}], tmp_path / "shards", "train", per_shard=1)
    (tmp_path / "train" / "b" / "1.jpg").write_bytes(content)
    pillow = {"jpg": Image.open(tmp_path / "train" / "a" / "0.jpg"), "cls": 0}
    for source in (tmp_path / "train", tmp_path / "shards" / "train-000000.tar"):
        recipe = ImageClassification(str(source), classes=2, layers=[1], image=32, val_resize=40)
        opened = open_source(recipe, "train", 0)
        read, [place], _ = opened.reader.reads(Refs([Ref(0, 0, 0)]), at_once=False)
        sample = read(place)
        assert isinstance(sample.get("jpg", sample.get("image")), Jpeg)
        for name in ("transform", "val_transform"):
            found, expected = (
                getattr(recipe, name)(each, np.random.default_rng(1))["image"].astype(int) for each in (sample, pillow)
            )
            assert np.abs(found - expected)[3:-3, 3:-3].max() <= 1


def test_only_training_is_augmented():
    recipe = ImageClassification("shards", classes=10, **{**SMALL, "val_resize": 12})
    sample = {"jpg": Image.effect_noise((40, 30), 64).convert("RGB"), "cls": 3}
    train, same, other = (recipe.transform(sample, np.random.default_rng(seed)) for seed in (0, 0, 1))
    val = [recipe.val_transform(sample, np.random.default_rng(seed))["image"] for seed in (0, 1)]
    assert (train["image"] == same["image"]).all() and (train["image"] != other["image"]).any()
    assert (val[0] == val[1]).all() and train["image"].shape == val[0].shape == (8, 8, 3)
    assert train["label"] == 3


@pytest.mark.parametrize(("more", "has"), [({}, "no cls"), ({"cls": 10}, "cls=10"), ({"cls": -1}, "cls=-1")])
def test_a_sample_of_no_class_is_refused(more, has):
    recipe = ImageClassification("shards", classes=10, **SMALL)
    message = rf"^recipe\.classes=10: a sample has {has}; give each sample a cls of 0 to 9$"
    sample = {"png": Image.new("RGB", (8, 8)), **more}
    with pytest.raises(ConfigError, match=message):
        recipe.transform(sample, np.random.default_rng(0))
    if more:
        with pytest.raises(ConfigError, match=message):
            recipe.val_transform(sample, np.random.default_rng(0))


def test_images_without_classes_are_predicted_alone(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    recipe = ImageClassification("shards", str(tmp_path), classes=3, **SMALL)
    samples = [recipe.val_transform(recipe.data("val")[0], np.random.default_rng(0))]
    samples.append(recipe.val_transform({"png": Image.new("RGB", (8, 8)), "cls": 1}, np.random.default_rng(0)))
    model, batch = Logits(torch.eye(3)[:2]), recipe.collate(samples)
    assert batch.keys() == {"image"} and recipe.predict(model, batch)["class"].tolist() == [0, 1]
    with refuses("recipe.val", "folder", "echelon"):
        recipe.metrics(model, batch)
    with refuses("recipe.train", "a.png"):
        ImageClassification(str(tmp_path), classes=3, **SMALL).data("train")
    after_digits = ImageClassification(None, str(tmp_path), classes=3, **SMALL)
    assert len(after_digits.data("val")) == 1
    with refuses("recipe.train=null", "classes=10", "recipe.train"):
        after_digits.data("train")


def write_folder(root: Path, names: dict[str, int]) -> None:
    for name, images in names.items():
        (root / name).mkdir(parents=True)
        for i in range(images):
            Image.new("RGB", (8, 8), (i, i, i)).save(root / name / f"{i}.png")


def test_the_classes_of_a_folder_are_those_of_training(tmp_path):
    write_folder(tmp_path / "train", {"ant": 2, "bee": 1, "cat": 1})
    write_folder(tmp_path / "val", {"cat": 1})
    paths = {"train": str(tmp_path / "train"), "val": str(tmp_path / "val")}
    recipe = ImageClassification(**paths, classes=3, **SMALL)
    train, val = recipe.data("train"), recipe.data("val")
    assert isinstance(train, ImageFolder) and train.labels.tolist() == [0, 0, 1, 2] and val.labels.tolist() == [2]
    assert recipe.labels == ["ant", "bee", "cat"]
    with refuses("recipe.classes=4", "3", "recipe.classes=3"):
        ImageClassification(**paths, classes=4, **SMALL).data("train")
    write_folder(tmp_path / "val", {"dog": 1})
    with pytest.raises(ConfigError, match="the folder dog is no class"):
        recipe.data("val")
    assert ImageClassification(paths["train"], classes=3, **SMALL).data("val") is None


def test_the_names_of_classes_beside_shards(tmp_path):
    recipe = ImageClassification(str(tmp_path / "train-*.tar"), classes=2, **SMALL)
    assert recipe.labels == ["0", "1"] and recipe.data("train") == str(tmp_path / "train-*.tar")
    (tmp_path / "classes.json").write_text('["ant", "bee"]')
    assert ImageClassification([str(tmp_path / "a.tar")], classes=2, **SMALL).labels == ["ant", "bee"]
    with refuses("recipe.data", "split=test"):
        recipe.data("test")


def shards_of(folder: Path, names: list[str] | None) -> str:
    folder.mkdir()
    if names is not None:
        (folder / "classes.json").write_text(json.dumps(names))
    return str(folder / "a-*.tar")


def test_names_of_classes_are_compared(tmp_path):
    names = ["ant", "bee", "cat"]
    named, same, bare = (shards_of(tmp_path / name, own) for name, own in (("1", names), ("2", names), ("3", None)))
    others, few = shards_of(tmp_path / "4", ["bee", "ant", "cat"]), shards_of(tmp_path / "5", ["ant", "bee"])
    write_folder(tmp_path / "train", dict.fromkeys(names, 1))
    write_folder(tmp_path / "val", {"bee": 1, "cat": 1})
    train, val = str(tmp_path / "train"), str(tmp_path / "val")

    def data(split: str, *sources: Any) -> Any:
        return ImageClassification(*sources, classes=3, **SMALL).data(split)

    assert data("val", named, val).labels.tolist() == data("val", train, val).labels.tolist() == [1, 2]
    for sources in ((named, same), (named, bare), (bare, named), (bare, bare), (train, named)):
        assert (data("train", *sources) is not None, data("val", *sources)) == (True, sources[1])
    packs = "pack both by echelon shards pack --classes, into one folder$"
    for split, sources, key, reason in (
        ("val", (named, others), f"recipe.val={others}", "classes.json has other names than recipe.train"),
        ("val", (train, others), f"recipe.val={others}", "classes.json has other names than recipe.train"),
        ("val", (train, bare), f"recipe.val={bare}", "no classes.json has the names of the classes"),
        ("val", (bare, val), f"recipe.val={val}", "no classes.json has the names of the classes of recipe.train"),
        ("train", ([named, others], None), f"{tmp_path}/4/classes.json", f"has other names than {tmp_path}/1/"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(f'{key}: {reason}')}.*; {packs}"):
            data(split, *sources)
    for split, sources in (("train", (few, named)), ("val", (bare, few))):
        with refuses("recipe.classes=3", "2", "recipe.classes=2"):
            data(split, *sources)


@pytest.mark.parametrize("name", ["resnet50", "resnet50_lars", "resnet_tiny"])
def test_the_presets(name):
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("config", [f"recipe={name}", *([] if name == "resnet_tiny" else ["recipe.train=shards"])])
    arguments = {str(key): value for key, value in config.recipe.items() if key != "_target_"}
    recipe = ImageClassification(**arguments)
    batch, tiny = (8192 if name == "resnet50_lars" else config.batch), name == "resnet_tiny"
    assert (config.batch, recipe.classes) == (batch, 10 if tiny else 1000)
    kind = "lars" if name == "resnet50_lars" else "sgd"
    assert config.optimizer._target_ == f"trainer.optim.factories.{kind}"
    assert config.schedule._target_ == "trainer.optim.schedule.Cosine"


def train(name: str, words: list[str], cwd: Path, timeout_s: float, **env: str) -> dict[str, Any]:
    """The run's summary."""
    done = run([f"recipe={name}", *words, "trainer.run_dir=runs/r", *QUICK], cwd, timeout_s=timeout_s, **env)
    assert done.code == 0, done.err
    return json.loads((cwd / "runs" / "r" / "summary.json").read_text())


@pytest.mark.slow
def test_two_steps_of_resnet50_on_shards_and_an_export_that_loads(tmp_path):
    for split in ("train", "val"):
        write_shards(list(digits.samples(split))[:24], tmp_path / "shards", split, per_shard=10)
    (tmp_path / "shards" / "classes.json").write_text(json.dumps([f"digit {i}" for i in range(10)]))
    words = ["recipe.train=shards/train-*.tar", "recipe.val=shards/val-*.tar", "recipe.classes=10", *OVERRIDES]
    words += ["batch=8", "trainer.max_steps=2", "trainer.devices=2", "data.workers=1", "schedule.warmup=0"]
    summary = train("resnet50", words, tmp_path, 120)
    assert (summary["steps"], summary["samples"], summary["ranks"]) == (2, 16, 2)
    assert 0 <= summary["val/accuracy"] <= summary["val/top5"] <= 1
    exported = load_file(tmp_path / "runs" / "r" / "export" / "model.safetensors")
    saved = load_file(tmp_path / summary["checkpoint"] / "model.safetensors")
    assert exported.keys() == saved.keys() and all(torch.equal(value, saved[name]) for name, value in exported.items())
    about = json.loads((tmp_path / "runs" / "r" / "export" / "config.json").read_text())
    assert about["labels"][3] == "digit 3" and about["image"] == 8
    model = ResNet(**about["network"])
    load_weights(model, str(tmp_path / "runs" / "r" / "export"))  # as trainer.init_from does
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("words", [[], ["optimizer=lars", "optimizer.lr=3"]], ids=["sgd", "lars"])
def test_resnet_tiny_reads_the_digits(words, tmp_path):
    summary = train("resnet_tiny", words, tmp_path, 380, XDG_CACHE_HOME=str(tmp_path / "cache"))
    print(summary["val/accuracy"], summary["val/loss"])
    assert summary["val/accuracy"] > 0.98 and summary["steps"] == 899
