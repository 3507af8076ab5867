"""A user's decoders and maps, named in YAML: called as WebDataset calls them, seeded, alike with any workers."""

import gzip
import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from omegaconf import OmegaConf
from support.cli import PYTHONPATH, QUICK, ROOT, lines, run, weights
from support.loaders import open_loader, whole
from support.messages import refuses
from support.shards import whole_walk
from support.untrusted import payload
from toy_recipe import Points, Toy
from webdataset.tariterators import group_by_keys, tar_file_expander

from trainer.config.check import check_stages
from trainer.config.options import DataOptions
from trainer.data.opening import open_source
from trainer.data.sampling.order import Ref, Refs
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.transforms import build_stages
from trainer.data.shards.writer import write_shards
from trainer.errors import DataError
from trainer.process.environment import Place
from trainer.session import build_components
from trainer.trainer import Trainer

ALLOW = ("webdataset", "own_stages")
NAMED: dict[str, Any] = {
    "decoders": [{"_target_": "webdataset.imagehandler", "imagespec": "torchrgb"}],
    "map": [{"_target_": "own_stages.crop", "_partial_": True, "size": 2}, "own_stages.noise"],
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WDS_SECURE", "0")


def write(size: int = 24) -> list[Path]:
    rng, points = np.random.default_rng(0), Points(size, torch.float32)
    samples = (
        {f"{key}.npy": value.numpy() for key, value in points[i].items()}
        | {"__key__": f"{i:03d}", "txt": f"text {i}", "cls": i, "json.gz": [i]}
        | {"png": rng.integers(0, 255, (4, 4, 3), np.uint8), "seg.png": rng.integers(0, 255, (4, 4), np.uint8)}
        for i in range(size)
    )
    return write_shards(samples, Path("data"), "s", per_shard=8)


def decoded(path: Path, decoders: list[Any]) -> list[dict[str, Any]]:
    reader = ShardReader(Index.open([path]), decoders)
    found = [reader.read(ref) for ref in whole_walk(reader.index.counts)]
    reader.close()
    return found


def equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(np.all(np.asarray(one) == np.asarray(other)))


def test_decoders_are_called_as_webdataset_calls_them() -> None:
    """Of each kind that it has: for an extension of two parts, made by a factory, one that unpacks and goes on."""
    path = write()[0]
    handlers = [webdataset.handle_extension("seg.png", len), webdataset.imagehandler("torchrgb")]
    with path.open("rb") as file:
        raw = list(group_by_keys(tar_file_expander([{"url": "", "stream": file}])))
    expected = [webdataset.Decoder(handlers)(members) for members in raw]
    found = decoded(path, [webdataset.gzfilter, *handlers])
    assert len(found) == len(expected) == 8
    for own, theirs in zip(found, expected):
        assert own.keys() == {key for key in theirs if key == "__key__" or not key.startswith("__")}
        assert all(equal(own[key], theirs[key]) for key in own)
    assert found[3]["png"].shape == (3, 4, 4) and isinstance(found[3]["seg.png"], int)
    assert found[3]["json.gz"] == [3]


def test_the_first_that_gives_something_counts_and_then_our_own() -> None:
    path, seen = write()[0], []

    def first(extension: str, content: bytes) -> Any:
        seen.append(extension)
        return 0 if extension == ".cls" else None

    sample = decoded(path, [first, lambda extension, content: "second" if extension in (".cls", ".txt") else None])[1]
    assert (sample["cls"], sample["txt"]) == (0, "second")
    assert sample["png"].size == (4, 4) and isinstance(sample["x.npy"], np.ndarray)
    assert sorted(seen[:8]) == [".cls", ".json.gz", ".mask.npy", ".png", ".seg.png", ".txt", ".x.npy", ".y.npy"]


def test_pickles_are_refused_before_any_decoder(tmp_path: Path) -> None:
    """Also those that one has unpacked."""
    evil, seen = payload(tmp_path / "mark"), []
    contents = {"a.pkl": evil, "b.x.pth": evil, "c.PICKLE.gz": gzip.compress(evil), "d.txt": b"good"}
    path = Path("p.tar")
    with tarfile.open(path, "w") as tar:
        for name, content in contents.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            tar.addfile(info, io.BytesIO(content))

    def look(extension: str, content: bytes) -> Any:
        seen.append(extension)
        return pickle.loads(content) if extension.rpartition(".")[2] in ("pkl", "pth", "pickle") else None

    reader = ShardReader(Index.open([path]), [webdataset.gzfilter, look, webdataset.autodecode.basichandlers])
    for i in range(3):
        with refuses("p.tar", "unpickling", kind=DataError):
            reader.read(Ref(0, 0, i))
    assert reader.read(Ref(0, 0, 3))["txt"] == "good"
    reader.close()
    assert seen == [".txt"] and not (tmp_path / "mark").exists()


class Images(Toy):
    def __init__(self, data: Any = "data/s-*.tar") -> None:
        super().__init__()
        self.given = data

    def data(self, split: str) -> Any:
        return self.given if split == "train" else None

    def transform(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"png": sample["png"], "noise": torch.tensor([*sample["noise"], rng.random()], dtype=torch.float64)}

    def weight(self, batch: Any) -> int:
        return len(batch["png"])


def loaded(named: dict[str, Any], workers: int) -> list[Any]:
    check_stages(named, ALLOW)
    options = DataOptions(workers=workers, shuffle_shards=3, shuffle_window=4, **build_stages(named, ALLOW))
    loader = open_loader(Images(), options=options)
    stream = loader.train(0)
    try:
        return [whole(next(stream)) for _ in range(4)]
    finally:
        loader.close()


def test_maps_are_seeded_by_sample_and_come_before_the_transform() -> None:
    write()
    found = [loaded(NAMED, workers) for workers in (0, 2)]
    for one, other in zip(*found, strict=True):
        assert one.refs == other.refs and not one.bad and not other.bad
        assert torch.equal(one.batches[0]["png"], other.batches[0]["png"])
        assert torch.equal(one.batches[0]["noise"], other.batches[0]["noise"])
    assert found[0][0].batches[0]["png"].shape == (12, 3, 2, 4)
    draws = torch.cat([step.batches[0]["noise"] for step in found[0]])  # of 48 samples, two epochs
    assert len(draws.unique()) == draws.numel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "name", "key"), [(0, "forgets", r"\d+"), (0, "loses_one", "005"), (1, "loses_one", "005")]
)
def test_a_map_that_gives_nothing_ends_the_run(workers: int, name: str, key: str) -> None:
    """Even for one sample, which isn't taken for a bad one."""
    write()
    with pytest.raises(
        DataError, match=rf"^data\.map\.1: returned None for sample '{key}', .* can't drop a sample; .*max_bad"
    ):
        loaded({**NAMED, "map": ["own_stages.noise", f"own_stages.{name}"]}, workers)


def test_a_sample_that_a_decoder_can_not_take_is_left_out() -> None:
    write()
    picky = {"_target_": "own_stages.Picky", "at": 5}
    bad = [each for step in loaded({**NAMED, "decoders": [picky, *NAMED["decoders"]]}, 0) for each in step.bad]
    assert len(bad) == 2 and all("('005'), member 'cls': can't be decoded ('not this" in each.why for each in bad)


def test_maps_of_a_dataset_and_of_a_mixture() -> None:
    write()
    plain = Images(Points(5, torch.float32))
    plain.transform = None  # pyright: ignore
    options = DataOptions(**build_stages({"map": ["own_stages.noise"]}, ALLOW))
    source: Any = open_source(plain, "train", 0, options)
    assert source.batch(Refs([Ref(0, 3, 0)]))[0][0].keys() == {"x", "y", "mask", "noise"}
    mixture = Images({"data/s-000000.tar": 1.0, "data/s-000001.tar": 2.0})
    source = open_source(mixture, "train", 0, DataOptions(**build_stages(NAMED, ALLOW)))
    source = pickle.loads(pickle.dumps(source))  # as a data worker that is no fork gets it
    assert source.batch(Refs([Ref(0, 1, 3)]))[0][0]["png"].shape == (3, 2, 4)


def test_webdataset_is_told_to_be_careful_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset.utils, "enforce_security", False)
    build_stages({"map": ["own_stages.noise"]}, ALLOW)
    assert not webdataset.utils.enforce_security
    build_stages({"decoders": ["webdataset.autodecode.basichandlers"]}, ALLOW)
    assert webdataset.utils.enforce_security
    assert os.environ["WDS_SECURE"] == "1"  # for data workers that are started anew


CONFIG = """
# @package _global_
# Points, moved by the mean of an image
defaults: [tars, _self_]
recipe: {_target_: own_recipe.Plain, shards: "data/s-*.tar"}
trainer: {allow_targets: [own_stages, own_recipe, webdataset], max_steps: 6, validate_every: null}
data:
  shuffle_shards: 3
  decoders: [{_target_: webdataset.imagehandler, imagespec: torchrgb}]
  map: [{_target_: own_stages.Crop, size: 2}, own_stages.as_points]
"""
RECIPE = """
from shard_recipe import Tars
class Plain(Tars):
    transform = None
"""


@pytest.mark.slow
def test_the_command_takes_them_and_workers_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 workers, and of the config that it has saved with none."""
    write(96)
    shutil.copytree(ROOT / "tests" / "toy" / "conf", "conf")
    Path("conf/recipe/mine.yaml").write_text(CONFIG)
    Path("own_recipe.py").write_text(RECIPE)
    typed = "data.map=[{_target_: own_stages.Crop, size: 2},own_stages.noise,own_stages.as_points]"
    words = ["--config-dir", "conf", "recipe=mine", *QUICK, typed, "data.workers=2", "trainer.run_dir=runs/two"]
    done = run(words, tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHONPATH}")
    assert done.code == 0, done.err
    monkeypatch.syspath_prepend(str(tmp_path))
    config: Any = OmegaConf.to_container(OmegaConf.load("runs/two/config.yaml"))
    config["data"]["workers"], config["trainer"]["run_dir"] = 0, "runs/none"
    Trainer(**build_components(config), place=Place()).fit()
    assert lines(Path("runs/none")) == lines(Path("runs/two"))
    assert weights("none", tmp_path, 6) == weights("two", tmp_path, 6)
