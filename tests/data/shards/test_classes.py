"""Classes from folders: what is refused, and the file of their names."""

import json
import re
from pathlib import Path

import pytest

from trainer.data.shards.classes import CLASSES, read_classes, with_classes
from trainer.data.shards.tar import split_name
from trainer.errors import DataError


def found(root: Path, *names: str) -> dict[str, dict[str, Path]]:
    """Files by key and extension."""
    grouped: dict[str, dict[str, Path]] = {}
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        key, extension = split_name(name)
        grouped.setdefault(str(key), {})[extension] = path
    return grouped


def test_each_sample_has_the_number_of_its_first_folder(tmp_path):
    files = found(tmp_path, "b/x.jpg", "a/deep/y.jpg", "a/deep/y.json")
    samples = {sample["__key__"]: sample for sample in with_classes(files, tmp_path / "out")}
    assert samples["b/x"] == {"__key__": "b/x", "jpg": b"b/x.jpg", "cls": "1"}
    assert samples["a/deep/y"]["cls"] == "0" and samples["a/deep/y"]["json"] == b"a/deep/y.json"
    assert json.loads((tmp_path / "out" / CLASSES).read_text()) == ["a", "b"]


def test_an_order_that_mixes_the_classes_and_is_always_the_same(tmp_path):
    files = found(tmp_path, *(f"{name}/{i}.jpg" for name in "ab" for i in range(10)))
    orders = [[sample["cls"] for sample in with_classes(files, tmp_path / str(i))] for i in range(2)]
    assert orders[0] == orders[1] and set(orders[0][:10]) == {"0", "1"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a/x.jpg", "y.jpg"), "y.jpg: is in no folder of a class; move it into one"),
        (("a/x.jpg", "c/y.jpg"), "c/y.jpg: c is no class of "),
        (("a/x.jpg", "a/x.cls"), "a/x.cls: --classes gives each sample a cls; remove this file"),
        (("a/x.jpg", "a/john.smith.jpg"), "a/john.smith.jpg: a key ends at the first dot, so this is a part of"),
    ],
)
def test_what_is_refused(names, message, tmp_path):
    (tmp_path / CLASSES).write_text('["a", "b"]')
    with pytest.raises(DataError, match=re.escape(message)):
        list(with_classes(found(tmp_path, *names), tmp_path))
    assert read_classes(tmp_path / CLASSES) == ["a", "b"]


@pytest.mark.parametrize("text", ["{}", "[1]", "no JSON", "[" * 100_000, ""])
def test_names_that_can_not_be_read(text, tmp_path):
    (tmp_path / CLASSES).write_text(text)
    with pytest.raises(
        DataError, match=r"classes\.json: can't be read \(.*\); give a JSON list of names, or remove it$"
    ):
        read_classes(tmp_path / CLASSES)


def test_nothing_is_written_for_no_samples(tmp_path):
    assert not list(with_classes({}, tmp_path)) and not list(tmp_path.iterdir())
