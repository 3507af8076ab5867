"""Stages whose replicas share the optimizer's state: bits and checkpoints of a pipeline without shard."""

from typing import Any

import pytest
from support.pipelines import train, whole
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Net, Toy

from trainer.callbacks.shard import Shard
from trainer.errors import ConfigError
from trainer.process.environment import Place

BATCH: dict[str, Any] = {"batch": 24, "accumulate": 4, "others": {}}
SHARD = {**BATCH, "others": {"shard": Shard}}


class TiedNet(nn.Module):
    """The first layer is the last one: both ends of the pipeline train it."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.first, self.blocks, self.last = net.first, net.blocks, nn.Linear(net.first.out_features, 8)  # pyright: ignore
        self.last.weight = nn.Parameter(net.first.weight.detach().T.clone())  # pyright: ignore
        self.first.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.first.weight.T, self.first.bias)
        for block in self.blocks:  # pyright: ignore
            x = x + block(x)
        return self.last(x)[:, :4]


class Tied(Toy):
    def model(self) -> nn.Module:
        return TiedNet(super().model())  # pyright: ignore


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def both(place: Place, knobs: dict[str, Any], run: dict[str, Any]) -> list[dict[str, Any]]:
    """A pipeline without shard, and one with it."""
    runs = [{**BATCH, **run}, {**SHARD, **run}]
    places = [Place(**{**vars(place), "store": f"{place.store}-{i}"}) for i in range(2)]
    return [train(each, knobs, settings) for each, settings in zip(places, runs, strict=True)]


@pytest.mark.parametrize(
    ("world", "knobs", "run"),
    [
        pytest.param(4, {"cut": [3]}, {}, marks=pytest.mark.slow),
        (4, {"schedule": "zbv", "cut": [1, 3, 5]}, {"recipe": Tied}),
        pytest.param(6, {"cut": [2]}, {"batch": 36, "recipe": Tied}, marks=pytest.mark.slow),  # three replicas
    ],
)
def test_shard_changes_no_bits_and_splits_the_state(here, world, knobs, run):
    ranks = run_ranks(world, both, knobs, run)
    replicas = world // 2
    for plain, sharded in ranks:
        assert sharded["losses"] == plain["losses"] and sharded["validation"] == plain["validation"]
        assert sharded["weights"].keys() == plain["weights"].keys()
        assert all((sharded["weights"][name] == value).all() for name, value in plain["weights"].items())
        assert sorted(plain["states"]) == sorted(plain["weights"])
        assert 0 < len(sharded["states"]) < len(plain["states"])
    for stage in (0, 1):
        group = ranks[stage * replicas : (stage + 1) * replicas]
        states = [name for _, sharded in group for name in sharded["states"]]
        assert sorted(states) == sorted(group[0][1]["weights"])  # each on one replica


@pytest.mark.slow
def test_checkpoints_load_into_any_layout_and_back(here):
    """Two samples at once: sums of two replicas have the bits of two ranks of DDP."""
    six = {"steps": 6}
    straight = run_ranks(2, train, None, {**BATCH, **six})
    plain = run_ranks(2, train, None, BATCH)
    sharded = run_ranks(4, train, {"cut": [2]}, SHARD)
    for saved in (plain[0]["saved"], sharded[0]["saved"]):
        layouts: list[tuple[int, dict[str, Any] | None, dict[str, Any]]] = [
            (2, None, BATCH),
            (2, None, SHARD),
            (4, {"cut": [4]}, SHARD),
            (4, {"schedule": "zbv"}, BATCH),
        ]
        for world, knobs, run in layouts:
            ranks = run_ranks(world, train, knobs, {**run, **six, "resume": saved})
            found = whole(ranks[:: world // 2] if knobs else ranks)
            copies = 2 - bool(run["others"])  # of the state of each parameter
            assert sum(len(rank["states"]) for rank in ranks) == copies * len(found)
            assert all((found[name] == value).all() for name, value in straight[0]["weights"].items()), (knobs, run)


def alone(place: Place) -> dict[str, Any]:
    return train(place, {}, SHARD)


def test_without_replicas_shard_does_nothing(here):
    ranks = run_ranks(2, alone)
    assert all(sorted(rank["states"]) == sorted(rank["weights"]) for rank in ranks)


def refused(place: Place, stage: int) -> str:
    try:
        train(place, {}, {**BATCH, "others": {"shard": lambda: Shard(stage=stage)}})  # pyright: ignore
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [2, 3])
def test_further_stages_lay_parameters_out_themselves(here, stage):
    assert "pipeline and shard both decide" in run_ranks(1, refused, stage)[0]
    assert Shard(stage=1).shares_with and not Shard(stage=2).shares_with
