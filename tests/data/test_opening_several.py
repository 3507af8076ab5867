"""Several data sets for validation: their names, their samples, and what is no such mapping."""

from typing import Any

import pytest
import torch
from support.messages import refuses
from toy_recipe import Points

from trainer.data.opening import open_source
from trainer.data.shards.writer import write_shards
from trainer.data.source import NamedSources, Samples, by_prefix
from trainer.errors import DataError


class Recipe:
    def __init__(self, data: Any) -> None:
        self.given = data

    def data(self, split: str) -> Any:
        return self.given


def points(size: int) -> Points:
    return Points(size, torch.float32)


def test_a_mapping_of_names_is_several_data_sets(tmp_path):
    shards = write_shards([{"__key__": "a", "cls": 1}], tmp_path, "val", per_shard=4)
    source = open_source(Recipe({"clean": points(3), "tar": str(shards[0]), "list": [torch.ones(2)]}), "val", 0)
    assert isinstance(source, NamedSources) and list(by_prefix(source, "val")) == ["val/clean", "val/tar", "val/list"]
    assert isinstance(source["clean"], Samples) and isinstance(source["tar"], Samples)
    assert (source.size, source["clean"].size) == (0, 3)  # a list does not tell


def test_the_fingerprint_follows_each_part():
    one, other, named = (
        open_source(Recipe(data), "val", 0)
        for data in (
            {"a": points(3), "b": points(4)},
            {"a": points(3), "b": points(5)},
            {"a": points(3), "c": points(4)},
        )
    )
    assert isinstance(one, NamedSources) and isinstance(other, NamedSources) and isinstance(named, NamedSources)
    assert len({one.fingerprint, other.fingerprint, named.fingerprint}) == 3
    assert one.size == 7


def test_a_mapping_of_weights_is_a_mixture(tmp_path):
    shards = write_shards([{"__key__": "a", "cls": 1}], tmp_path, "val", per_shard=4)
    assert isinstance(open_source(Recipe({str(shards[0]): 2}), "val", 0), Samples)


def test_no_data_set_at_all_is_said_so():
    with refuses("recipe.data('val')", "empty", "name", kind=DataError):
        open_source(Recipe({}), "val", 0)


@pytest.mark.parametrize("data", [{"a": None}, {1: points(3)}, {"a/b": points(3)}, {"a b": points(3)}])
def test_other_mappings_are_refused(data):
    with refuses("recipe.data('val')", "'_'", kind=DataError):
        open_source(Recipe(data), "val", 0)


def test_training_has_one_data_set():
    with refuses("recipe.data('train')", "data[split]"):
        open_source(Recipe({"a": points(3)}), "train", 0)
