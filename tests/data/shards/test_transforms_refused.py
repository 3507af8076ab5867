"""Decoders and maps that can't work: one line with the key and the way out, before anything is built, or is run."""

from typing import Any

import pytest
import torch
from toy_recipe import Points
from yaml import safe_load

from trainer.config.check import check_stages
from trainer.config.options import DataOptions
from trainer.data.opening import open_source
from trainer.data.shards.transforms import build_stages
from trainer.errors import ConfigError

ALLOW = ("webdataset", "own_stages")

# What is named, and indented what the line must say.
BEFORE_IT_IS_BUILT = """
map: [os.getcwd]
    data.map.0._target_=os.getcwd: os is not a package that configs may name; if you trust it, add 'trainer.
map: [own_stages.random.seed]
    data.map.0._target_=own_stages.random.seed: No module named 'own_stages.random'
map: [crop]
    data.map.0._target_=crop: is not a full name; write package.module.Name
map: [own_stages.corp]
    data.map.0._target_=own_stages.corp: module 'own_stages' has no attribute 'corp'; name an
map: [own_stages.crop, 3]
    data.map.1=3: must be the name of a function, or a _target_ with its arguments
map: [{size: 3}]
    data.map.0={'size': 3}: must be the name of a function, or a _target_ with its arguments
map: [{_target_: own_stages.crop, _partial_: true, sise: 3}]
    data.map.0.sise=3: no such key; did you mean size?
map: [{_target_: own_stages.Crop, size: "3"}]
    data.map.0.size=3: must be int, not str
map: [{_target_: own_stages.Crop}]
    data.map.0.size: is missing; give data.map.0.size=VALUE
decoders: [{_target_: own_stages.Picky, at: {_target_: os.getcwd}}]
    data.decoders.0.at._target_=os.getcwd: a _target_ inside arguments is not built; give a plain value
decoders: [{_target_: webdataset.imagehandler}]
    data.decoders.0.imagespec: is missing; give data.decoders.0.imagespec=VALUE
"""
BEFORE_A_RUN = """
map: [own_stages.two]
    data.map.0=own_stages.two: can't be called with (sample): missing a required argument: 'other'; correct it
decoders: [own_stages.noise]
    data.decoders.0=own_stages.noise: can't be called with (extension, bytes): too many positional arguments; correct it
map: [own_stages.Crop]
    data.map.0=own_stages.Crop: is a class; write {_target_: own_stages.Crop} with its arguments
map: [{_target_: own_stages.Crop, _partial_: true}]
    data.map.0=own_stages.Crop: is a class; write {_target_: own_stages.Crop} with its arguments
map: [{_target_: own_stages.no_function, size: 3}]
    data.map.0=own_stages.no_function: can't be called with (sample): 3 is not a callable object; correct it
decoders: [{_target_: webdataset.imagehandler, imagespec: purple}]
    data.decoders.0=webdataset.imagehandler: Unknown imagespec: purple; correct its arguments
"""


def cases(table: str) -> list[tuple[str, str]]:
    lines = table.strip().splitlines()
    return [(named, said.strip()) for named, said in zip(lines[::2], lines[1::2], strict=True)]


@pytest.fixture(autouse=True)
def _careful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_SECURE", "0")  # and put back what it was


@pytest.mark.parametrize(("named", "said"), cases(BEFORE_IT_IS_BUILT))
def test_said_before_it_is_built(named: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_stages(safe_load(named), ALLOW)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(("named", "said"), cases(BEFORE_A_RUN))
def test_said_before_a_run(named: str, said: str) -> None:
    check_stages(safe_load(named), ALLOW)
    with pytest.raises(ConfigError) as caught:
        build_stages(safe_load(named), ALLOW)
    assert str(caught.value) == said


class Given:
    def __init__(self, data: Any) -> None:
        self.given = data

    def data(self, split: str) -> Any:
        return self.given


POINTS, BATCHES = Points(24, torch.float32), [{"x": torch.zeros(12, 3)}]


@pytest.mark.parametrize(
    ("data", "named", "said"),
    [
        (POINTS, "decoders: [own_stages.shout]", "data.decoders: recipe.data('train') has no shards to decode; "),
        (BATCHES, "decoders: [own_stages.shout]", "data.decoders: recipe.data('train') has no shards to decode; "),
        (
            BATCHES,
            "map: [own_stages.noise]",
            "data.map: recipe.data('train') gives batches, and data.map takes samples; ",
        ),
    ],
    ids=["of a dataset", "of batches", "of batches, map"],
)
def test_what_would_have_no_effect_is_refused(data: Any, named: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_source(Given(data), "train", 0, DataOptions(**build_stages(safe_load(named), ALLOW)))
    assert str(caught.value).startswith(said)
