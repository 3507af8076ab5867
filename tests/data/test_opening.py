"""What a recipe's data may be, and what becomes of each kind."""

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.messages import refuses
from torch.utils.data import DataLoader, IterableDataset, random_split
from toy_recipe import Points, Toy

import trainer.data.shards.index as index_module
from trainer.config.options import DataOptions, Options
from trainer.data.opening import open_source
from trainer.data.sampling.order import Ref, Refs
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import DataError
from trainer.optim.schedule import Constant
from trainer.plan import Plan
from trainer.process.environment import Place


def sample(source, ref):
    [value], _ = source.batch(Refs([ref]))
    return value


class Recipe:
    def __init__(self, data) -> None:
        self.given = data

    def data(self, split: str):
        return self.given


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    samples = ({"__key__": f"{i:02d}", "cls": i, "txt": f"sample {i}"} for i in range(10))
    return write_shards(samples, tmp_path_factory.mktemp("shards"), "train", per_shard=4)


def test_shards_by_path_pattern_and_list(shards):
    every = [
        open_source(Recipe(data), "train", 0)
        for data in (str(shards[0].parent / "*.tar"), shards, list(map(str, shards)))
    ]
    assert [source.counts for source in every] == [[4, 4, 2]] * 3
    assert len({source.fingerprint for source in every}) == 1
    one = open_source(Recipe(shards[1]), "train", 0)
    assert one.counts == [4]
    assert one.fingerprint != every[0].fingerprint
    assert sample(every[0], Ref(0, 2, 1)) == {"__key__": "09", "cls": 9, "txt": "sample 9"}


class OfNode(Toy):
    def __init__(self, folder) -> None:
        super().__init__()
        self.folder = folder

    def data(self, split: str):
        return str(self.folder / "*.tar") if split == "train" else super().data(split)


def test_of_each_node_one_rank_indexes_what_the_node_alone_has(shards, tmp_path, monkeypatch):
    """Three nodes with two ranks each. Whoever goes at the same time meets here, and would index the same."""
    folders, scanned, scan = [tmp_path / str(node) for node in range(3)], list[str](), index_module.scan_shard
    for folder in folders:
        shutil.copytree(shards[0].parent, folder, ignore=shutil.ignore_patterns("*.idx"))
    meeting, said = threading.Barrier(6, timeout=60), list(range(6))

    def each_of(rank: int):
        def each(value):
            said[rank] = value
            meeting.wait()
            found = list(said)
            meeting.wait()
            return found

        return each

    def slowly(path):
        scanned.append(str(path))
        time.sleep(0.2)
        return scan(path)

    def plan(rank: int) -> Plan:
        try:
            return Plan(
                OfNode(folders[rank // 2]), {}, Constant(), batch=12, micro_batch=None, accumulate=None,
                options=Options(), data=DataOptions(), place=Place(rank, 6, rank % 2, 2), each=each_of(rank),
            )  # fmt: skip
        except BaseException:
            meeting.abort()
            raise

    monkeypatch.setattr(index_module, "scan_shard", slowly)
    with ThreadPoolExecutor(6) as pool:
        plans = list(pool.map(plan, range(6)))
    assert len({plan.source.fingerprint for plan in plans}) == 1
    assert Counter(scanned) == {str(folder / shard.name): 1 for folder in folders for shard in shards}


def test_a_map_style_dataset_is_one_sample_a_shard():
    source = open_source(Recipe(Points(5, torch.float32)), "train", 0)
    assert isinstance(source, Samples)
    assert source.counts == [1] * 5
    for i in range(5):
        assert torch.equal(sample(source, Ref(0, i, 0))["x"], Points(5, torch.float32)[i]["x"])


def test_the_fingerprint_of_a_dataset():
    """Its class and length, or what it says itself in place of its class."""
    one, other = Points(5, torch.float32), Points(5, torch.float32)
    other.fingerprint = "release 2"
    several = [open_source(Recipe(data), "train", 0).fingerprint for data in (one, other, Points(6, torch.float32))]
    assert len(set(several)) == 3
    assert open_source(Recipe(Points(5, torch.float64)), "train", 1).fingerprint == several[0]


def test_what_else_can_be_iterated_stays_as_it_is():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    batches = [torch.zeros(2)]
    for data in (batches, Stream(), iter(batches)):
        assert open_source(Recipe(data), "train", 0).given is data
    assert open_source(Recipe(None), "val", 0) is None


def test_data_whose_truth_or_length_raises_has_no_size():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter([torch.zeros(2)])

    assert [open_source(Recipe(data), "val", 0).size for data in (DataLoader(Endless()), torch.zeros(2, 3))] == [0, 0]
    assert open_source(Toy(), "val", 0).size == 13


def test_an_empty_dataset_is_refused():
    with refuses("recipe.data('val')", "dataset", "empty", kind=DataError):
        open_source(Recipe(Points(0, torch.float32)), "val", 0)


class Draws(Points):
    def __getitem__(self, i: int):
        return random.random(), float(np.random.random()), float(torch.rand(()))


class Drawing(Recipe):
    def transform(self, sample, rng):
        return (*sample, rng.random(), random.random(), float(torch.rand(())))


def test_a_samples_randomness_is_a_function_of_seed_epoch_and_sample():
    """Read in any order, after any other use of the generators; each of the three keys changes every draw."""
    sources = [open_source(Drawing(Draws(4, torch.float32)), "train", seed) for seed in (0, 1)]
    refs = [Ref(epoch, shard, 0) for epoch in (0, 1) for shard in range(4)]
    draws = {(seed, ref): sample(sources[seed], ref) for seed in (0, 1) for ref in refs}
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert {(seed, ref): sample(sources[seed], ref) for ref in reversed(refs) for seed in (1, 0)} == draws
    columns = list(zip(*draws.values()))
    assert len(columns) == 6
    assert all(len(set(column)) == 16 for column in columns)


def test_a_random_split_in_data_cuts_both_times_at_the_same_places():
    class Split:
        def data(self, split: str):
            parts = random_split(list(range(50)), [40, 10])
            return parts[split == "val"]

    numbers = {}
    for seed in (0, 0, 1):
        torch.manual_seed(len(numbers)), random.seed(len(numbers))
        found = {split: open_source(Split(), split, seed).reader.dataset for split in ("train", "val")}
        assert sorted([*found["train"], *found["val"]]) == list(range(50))
        assert numbers.setdefault(seed, list(found["val"])) == list(found["val"])
    assert numbers[0] != numbers[1]


@pytest.mark.parametrize("batches", [iter([]), map(str, []), (i for i in [])])
def test_an_iterator_is_no_validation_data(batches):
    assert open_source(Recipe(batches), "train", 0).given is batches
    with refuses("recipe.data('val')", "used", "__iter__", kind=DataError):
        open_source(Recipe(batches), "val", 0)


class Once:
    """Samples that can be walked only once."""

    yields_samples = True

    def __init__(self) -> None:
        self.samples = iter([1])

    def __iter__(self) -> Iterator[int]:
        return self.samples


def test_samples_that_can_be_walked_once_are_no_validation_data_either():
    open_source(Recipe(Once()), "train", 0)
    with refuses("recipe.data('val')", "Once", "used", "__iter__", kind=DataError):
        open_source(Recipe(Once()), "val", 0)


class Augments(Recipe):
    def transform(self, sample, rng):
        return sample, float(rng.random())

    def val_transform(self, sample, rng):
        return sample, "as it is"


def test_samples_that_are_not_trained_on_have_a_transform_of_their_own(shards):
    """In each kind of data; `data.map` applies to both."""
    ref, mapped = Ref(0, 0, 0), DataOptions(map=[lambda sample: {"mapped": sample}])
    for data in (str(shards[0]), {str(shards[0]): 1.0}, Points(5, torch.float32)):
        for options in (None, mapped):
            train, val, same = (
                sample(open_source(Augments(data), split, 0, options, **asked), ref)
                for split, asked in (("train", {}), ("val", {}), ("train", {"validates": True}))
            )
            assert isinstance(train[1], float) and val[1] == same[1] == "as it is"
            assert options is None or train[0].keys() == val[0].keys() == {"mapped"}
    named = open_source(Augments({"a": Points(5, torch.float32)}), "val", 0)
    assert sample(named["a"], ref)[1] == "as it is"


def test_without_one_both_splits_have_the_same_transform(shards):
    class Plain(Recipe):
        def transform(self, sample, rng):
            return float(rng.random())

    train, val = (sample(open_source(Plain(str(shards[0])), split, 0), Ref(0, 0, 0)) for split in ("train", "val"))
    assert train == val


def test_an_overfit_validates_on_samples_as_validation_has_them():
    class Both(Toy):
        def transform(self, sample, rng):
            return sample | {"augmented": 1.0}

        def val_transform(self, sample, rng):
            return sample

    plan = Plan(
        Both(), {}, Constant(), batch=6, micro_batch=None, accumulate=None,
        options=Options(overfit=1, max_steps=1), data=DataOptions(), place=Place(), each=lambda value: [value],
    )  # fmt: skip
    train, val = (sample(source, Ref(0, 0, 0)) for source in (plan.source, plan.validation))
    assert train.keys() - val.keys() == {"augmented"} and torch.equal(train["x"], val["x"])
    assert plan.source.counts == plan.validation.counts == [1] * 6


def test_a_split_that_the_recipe_lacks_is_named():
    """A KeyError for anything else is the recipe's own."""

    class Has:
        def data(self, split):
            return {"train": [1]}[split] if split != "own" else {}["key"]

    with refuses("recipe.data('tset')", "knows no such split", "a split that it has"):
        open_source(Has(), "tset", 0)
    with refuses("recipe.data('val')", "return None"):
        open_source(Has(), "val", 0)
    with pytest.raises(KeyError, match=r"^'key'$"):
        open_source(Has(), "own", 0)
