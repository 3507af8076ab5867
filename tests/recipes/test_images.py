"""Images for classification: every mode becomes RGB, folders of classes, what is refused."""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.messages import refuses
from support.shards import whole_walk

from recipes import digits
from recipes.images import ImageFolder, normalise
from trainer.data.images import DEVIATION, MEAN, LazyJpeg, augment, crop_middle
from trainer.data.shards.decoders import decode
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.errors import ConfigError, DataError, UnavailableError


def ramp(width: int, height: int) -> Image.Image:
    """Red grows to the right, green to the bottom."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), np.zeros_like(x)], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, form: str) -> bytes:
    content = io.BytesIO()
    image.save(content, form)
    return content.getvalue()


@pytest.mark.parametrize(
    ("mode", "form"), [("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("CMYK", "JPEG")]
)
def test_an_image_of_any_mode_becomes_rgb(mode, form, tmp_path):
    """From a folder, and in a shard, whose decoder is the same."""
    content = encoded(Image.new("RGB", (20, 10), (255, 255, 255)).convert(mode), form)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"x.{form.lower()}").write_bytes(content)
    folder = ImageFolder(tmp_path)
    for image in (folder[0]["image"], decode(form.lower(), content)):
        assert image.mode == "RGB" and (np.array(image) > 250).all()
        assert augment(image, 4, 0.5, True, np.random.default_rng(0)).shape == (4, 4, 3)
        assert crop_middle(image, 4, 6).shape == (4, 4, 3)


@pytest.mark.parametrize("channels_last", [True, False])
def test_pixels_are_normalised_per_channel(channels_last):
    bytes_ = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).view(2, 4, 5, 3)
    found = normalise(bytes_, channels_last)
    assert found.shape == (2, 3, 4, 5) and found.dtype == torch.float32
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)
    for channel in range(3):
        expected = (bytes_[..., channel].numpy() / 255 - MEAN[channel]) / DEVIATION[channel]
        assert found[:, channel].numpy() == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def photos(tmp_path) -> Path:
    root = tmp_path / "photos"
    for name in ("dog/1.png", "dog/deep/0.JPG", "cat/2.jpeg", "cat/notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("txt"):
            (root / name).write_text("no image")
        else:
            ramp(6, 6).save(root / name, "PNG" if name.endswith("png") else "JPEG")
    return root


def test_a_folder_with_a_folder_per_class(photos):
    found = ImageFolder(photos)
    assert found.classes == ["cat", "dog"] and len(found) == 3
    assert found.files == ["cat/2.jpeg", "dog/1.png", "dog/deep/0.JPG"] and found.labels.tolist() == [0, 1, 1]
    assert found[2]["cls"] == 1 and found[2]["image"].size == (6, 6)
    other = ImageFolder(photos, ["dog", "bird", "cat"])
    assert other.labels.tolist() == [2, 0, 0]
    assert len({found.fingerprint, other.fingerprint}) == 2
    for hidden in ("__MACOSX/cat/._2.jpeg", ".ipynb_checkpoints/2.jpeg", "cat/.ipynb_checkpoints/2-checkpoint.jpeg"):
        (photos / hidden).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / "cat" / "2.jpeg", photos / hidden)
    assert ImageFolder(photos).fingerprint == found.fingerprint
    shutil.copy(photos / "cat" / "2.jpeg", photos / "cat" / "3.jpeg")
    assert ImageFolder(photos).fingerprint != found.fingerprint


def test_folders_that_are_refused(photos, tmp_path):
    key = re.escape(f"recipe.val={photos}: ")
    with pytest.raises(ConfigError, match=rf"^{key}the folder dog is no class; the classes are cat, \.\.\.$"):
        ImageFolder(photos, ["cat"], "recipe.val")
    shutil.copy(photos / "cat" / "2.jpeg", photos / "x.jpeg")
    with pytest.raises(ConfigError, match=rf"^{key}x\.jpeg is in no folder of a class; give a folder with"):
        ImageFolder(photos, key="recipe.val")
    (photos / "x.jpeg").rename(tmp_path / "x.jpeg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there is no folder with images in it; give a folder with a folder per"):
        ImageFolder(tmp_path / "empty")


def test_a_folder_leaves_its_jpegs_to_a_decoder_and_a_damaged_one_has_its_name(photos):
    found, plain = ImageFolder(photos, decoders=[LazyJpeg()]), ImageFolder(photos)
    for i in range(3):
        crops = [crop_middle(each[i]["image"], 6, 6) for each in (found, plain)]
        assert (crops[0] == crops[1]).all() and found[i]["cls"] == plain[i]["cls"]
    path = photos / "cat" / "2.jpeg"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match=rf"^{path}: can't be decoded \(.*\); write it again or remove it$"):
        crop_middle(found[0]["image"], 6, 6)


def test_images_in_no_folder_have_no_class(photos):
    with refuses("recipe.train", "1.png"):
        ImageFolder(photos / "dog", labelled=False)  # others are in one
    shutil.rmtree(photos / "dog" / "deep")
    found = ImageFolder(photos / "dog", ["cat"], labelled=False)
    assert len(found) == 1 and found[0].keys() == {"image"} and not found.labelled
    with refuses("recipe.train", "1.png"):
        ImageFolder(photos / "dog")
    assert ImageFolder(photos, labelled=False)[0]["cls"] == 0


def test_a_file_that_is_no_image_counts_as_damaged_and_one_that_is_gone_does_not(photos):
    found = ImageFolder(photos)
    (photos / "cat" / "2.jpeg").write_bytes(b"no image")
    (photos / "dog" / "1.png").unlink()
    with pytest.raises(DataError, match=r"2\.jpeg: can't be decoded \(.*\); write it again or remove it$"):
        found[0]
    with pytest.raises(UnavailableError, match=r"1\.png: .*No such file.*; fix the cause, then resume$"):
        found[1]


def read_shards(paths: list[Path]) -> list[dict[str, Any]]:
    index = Index.open(find_shards([str(path) for path in paths]))
    reader = ShardReader(index)
    return [reader.read(ref) for ref in whole_walk(index.counts)]


def test_the_digits_are_scikit_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from sklearn.datasets import load_digits

    train, val = (read_shards(digits.shards(split)) for split in ("train", "val"))
    assert (len(train), len(val)) == (1438, 359)
    found: Any = load_digits()
    for sample in (*train[:50], *val[:50]):
        i = int(sample["__key__"])
        assert sample["cls"] == found.target[i] and (i % 5 == 4) == any(sample is other for other in val)
        assert np.round(np.array(sample["png"])[..., 0] * (16 / 255)).tolist() == found.images[i].tolist()
    assert len({sample["__key__"] for sample in (*train, *val)}) == 1797
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "echelon" / "digits").glob("*.tar")}
    digits.shards("train")
    assert {path: path.stat().st_mtime_ns for path in written} == written  # written once
    assert {path.name for path in (tmp_path / "echelon").iterdir()} == {"digits", "digits.lock"}


def test_what_a_killed_process_has_written_of_the_digits_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(digits, "samples", lambda split: [{"__key__": split, "png": b"", "cls": 1}])
    (tmp_path / "echelon" / "digits.partial").mkdir(parents=True)
    (tmp_path / "echelon" / "digits.partial" / "train-000000.tar").touch()
    assert [path.stat().st_size > 0 for path in digits.shards("train")] == [True]
    assert {path.name for path in (tmp_path / "echelon").iterdir()} == {"digits", "digits.lock"}


def test_digits_without_scikit_learn_or_a_writable_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"^XDG_CACHE_HOME={tmp_path}/file: .*; give a writable folder with free"):
        digits.shards("train")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with refuses("recipe.train=null", "'scikit-learn>=1.7,<2'"):
        digits.shards("train")
    assert not (tmp_path / "echelon" / "digits").exists()
