"""Averages of stages, and stages that compute in bf16: the bits of the unsplit model."""

from typing import Any

import pytest
from support.pipelines import same_bits, train
from support.quick import quick
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Net, Toy

from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.ema import EMA
from trainer.callbacks.shard import Shard


def ema() -> EMA:
    return EMA(decay=0.5)


AVERAGE: dict[str, Any] = {"others": {"ema": ema}}


class Norms(Toy):
    """Buffers before, in and after the blocks."""

    def model(self) -> nn.Module:
        net: Net = super().model()  # pyright: ignore
        net.first = nn.Sequential(net.first, nn.BatchNorm1d(self.width))
        for i, block in enumerate(net.blocks):  # pyright: ignore
            block.append(nn.BatchNorm1d(self.width, momentum=0.1 * (i + 1)))
        net.last = nn.Sequential(nn.BatchNorm1d(self.width), net.last)
        return net


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def averages(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for rank in ranks for name, value in rank["averages"].items()}


def same_averages(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    found = averages(ranks)
    assert found.keys() == alone["averages"].keys()
    assert all((found[name] == value).all() for name, value in alone["averages"].items())
    assert any((alone["averages"][name] != value).any() for name, value in alone["weights"].items())
    assert all(rank["validation"] == alone["validation"] for rank in ranks)


@pytest.mark.parametrize(("stages", "knobs"), quick([(3, {"cut": [1, 4]}), (2, {"schedule": "zbv", "cut": [1, 3, 5]})]))
def test_each_stage_averages_its_own_weights(here, stages, knobs):
    run = {**AVERAGE, "others": {**AVERAGE["others"], "activation_checkpoint": ActivationCheckpoint}}
    (alone,) = run_ranks(1, train, None, AVERAGE)
    ranks = run_ranks(stages, train, {"stages": stages, **knobs}, run)
    same_bits(ranks, alone)
    same_averages(ranks, alone)
    for rank in ranks:
        assert rank["averages"].keys() == rank["weights"].keys()  # nothing of other stages is in memory


@pytest.mark.slow
def test_an_average_is_whole_in_the_checkpoint(here):
    """So it loads into any other layout, and back. Two replicas, whose buffers and whose first rank's parts count."""
    run = {**AVERAGE, "recipe": Norms, "batch": 24, "accumulate": 3}
    six = {**run, "steps": 6}
    straight = run_ranks(2, train, None, six)
    plain, staged = run_ranks(2, train, None, run), run_ranks(4, train, {"cut": [4]}, run)
    for saved in (plain[0]["saved"], staged[0]["saved"]):
        for world, knobs, others in ((2, None, {}), (4, {"cut": [2]}, {"shard": Shard})):
            changed = {**six, "others": {**run["others"], **others}, "resume": saved}
            ranks = run_ranks(world, train, knobs, changed)
            assert averages(ranks).keys() == straight[0]["averages"].keys()
            assert all((averages(ranks)[name] == value).all() for name, value in straight[0]["averages"].items())


def test_bf16_parameters_have_the_unsplit_models_bits(here):
    run = {**AVERAGE, "precision": "bf16_params"}
    (alone,) = run_ranks(1, train, None, run)
    assert alone["losses"] != run_ranks(1, train, None, AVERAGE)[0]["losses"]
    ranks = run_ranks(3, train, {"stages": 3}, run)
    same_bits(ranks, alone)
    same_averages(ranks, alone)
