"""Reading data with a model: samples that can't be read are left out within a limit, and every sample has its key."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer.comm.ranks import Ranks
from trainer.config.options import DataOptions
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError
from trainer.inference.inference import Inference
from trainer.precision import Precision
from trainer.process.environment import Place


class Shards:
    def __init__(self, folder: Path, bad: int) -> None:
        self.folder, self.bad = folder, bad

    def data(self, split: str) -> Any:
        return str(self.folder / "*.tar")

    def transform(self, sample: dict[str, Any], rng: Any) -> Tensor:
        if sample["cls"] < self.bad:
            raise DataError("is damaged")
        return torch.tensor([float(sample["cls"])])

    def predict(self, model: nn.Module, batch: Tensor) -> Tensor:
        return batch[:, 0] * 2

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return batch.mean()


def read(place: Place, folder: Path, bad: int, max_bad: float) -> Any:
    ranks = Ranks(place, "cpu", "gloo", 20.0)
    reads = Inference(
        Shards(folder, bad), ranks, Precision("fp32", torch.device("cpu")), DataOptions(workers=0, max_bad=max_bad),
        micro=3, seed=0, data_rank=ranks.rank, data_world=ranks.world,
    )  # fmt: skip
    try:
        found = reads.predict(nn.Linear(1, 1), "val")
        metrics = reads.evaluate(nn.Linear(1, 1), "val")
    except DataError as error:
        return str(error)
    finally:
        ranks.leave()
    return found.index, found.keys, found["prediction"].tolist(), metrics


@pytest.fixture
def folder(tmp_path) -> Path:
    write_shards(({"__key__": f"k{i:02d}", "cls": i} for i in range(20)), tmp_path, "val", per_shard=7)
    return tmp_path


@pytest.mark.parametrize("world", [1, 2])
def test_bad_samples_are_left_out(folder, world):
    kept = range(4, 20)
    expected = (list(kept), [f"k{i:02d}" for i in kept], [2.0 * i for i in kept])
    for *found, metrics in run_ranks(world, read, folder, 4, 0.5):
        assert tuple(found) == expected and metrics == {"val/loss": pytest.approx(sum(kept) / len(kept))}


def test_too_many_bad_samples_are_an_error(folder):
    (said,) = run_ranks(1, read, folder, 12, 0.0)
    assert said.startswith("data.max_bad: 12 samples could not be read; the first: is damaged")


def test_the_bad_samples_of_all_ranks_count_together(folder):
    for said in run_ranks(2, read, folder, 12, 1e-4):  # of ten that may be bad, each rank has six
        assert said.startswith("data.max_bad: 12 samples could not be read; the first: is damaged")


def test_no_sample_is_augmented_not_even_one_for_training(folder):
    class Augments(Shards):
        def transform(self, sample: dict[str, Any], rng: Any) -> Tensor:
            return torch.full((1,), float("nan"))

        def val_transform(self, sample: dict[str, Any], rng: Any) -> Tensor:
            return super().transform(sample, rng)

    ranks = Ranks(Place(), "cpu", "gloo", 20.0)
    reads = Inference(
        Augments(folder, 0), ranks, Precision("fp32", torch.device("cpu")), DataOptions(workers=0), micro=3, seed=0
    )
    assert reads.predict(nn.Linear(1, 1), "train")["prediction"].tolist() == [2.0 * i for i in range(20)]
    assert reads.evaluate(nn.Linear(1, 1), "train") == {"train/loss": 9.5}


class Given:
    def __init__(self, data: Any, count: int = 0) -> None:
        self.given, self.count = data, count

    def data(self, split: str) -> Any:
        return self.given

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        return {"x": (batch.sum(), self.count)}


def refused(recipe: Any, split: str) -> str:
    reads = Inference(
        recipe, Ranks(Place(), "cpu", "gloo", 20.0), Precision("fp32", torch.device("cpu")),
        DataOptions(workers=0, max_bad=0.0), micro=3, seed=0,
    )  # fmt: skip
    with pytest.raises((ConfigError, DataError)) as caught:
        reads.evaluate(nn.Linear(1, 1), split)
    return str(caught.value)


class Once:
    """A generator in an object's clothes, of batches or of samples."""

    def __init__(self, yields_samples: bool) -> None:
        self.yields_samples, self.batches = yields_samples, itertools.cycle([torch.ones(3)])

    def __iter__(self) -> Iterator[Tensor]:
        return self.batches


@pytest.mark.parametrize("data", [itertools.cycle([torch.ones(3)]), Once(False), Once(True)])
def test_a_generator_for_training_which_may_have_no_end_is_refused(data):
    assert refused(Given(data, 3), "train") == (
        "recipe.data('train'): the iterable can be walked only once, so it may have no end; return a Dataset, or name "
        "another split"
    )


def test_what_is_wrong_is_told_of_the_split(folder):
    batches = [torch.ones(3)]
    assert refused(Given(batches), "test").startswith(
        "recipe.metrics(): the count of x is 0 in every batch of recipe.data('test'); return (sum, count)"
    )
    assert refused(Given(DataLoader(batches, 2, drop_last=True), 3), "test").startswith(
        "recipe.data('test'): gave no batch, or only batches of weight 0; return data "
    )
    assert refused(Shards(folder, 12), "test").startswith(
        "data.max_bad: 12 of 20 samples of recipe.data('test') could not be read, and the limit is 0; the first: "
    )
