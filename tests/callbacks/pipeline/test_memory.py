"""Cuts that fit the memory of each rank, with the model's own bytes."""

from typing import Any

import pytest
import torch
from support.pipelines import same_bits, train
from support.ranks import run_ranks
from torch.autograd.graph import saved_tensors_hooks
from toy_recipe import Toy

from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.ema import EMA
from trainer.callbacks.pipeline import callback as module
from trainer.callbacks.pipeline.profile_blocks import try_whole
from trainer.callbacks.shard import Shard
from trainer.errors import ConfigError
from trainer.process.environment import Place


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def limited(place: Place, mib: list[float], knobs: dict[str, Any], run: dict[str, Any]) -> dict[str, Any] | str:
    """Each rank has a limit of its own."""
    try:
        return train(place, {**knobs, "memory_gib": mib[place.rank] / 1024}, {"width": 64, **run})
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_a_large_rank_gets_many_blocks(here):
    """Ranks as fast as each other. A block of width 64 needs 65 KiB and more."""
    limits = [0.2, 100.0, 100.0]
    ranks = run_ranks(3, limited, limits, {"stages": 3}, {"depth": 8})
    starts = ranks[0]["starts"]
    assert [rank["starts"] for rank in ranks] == [starts] * 3
    assert starts[1] <= 2
    other = run_ranks(3, limited, limits[::-1], {"stages": 3}, {"depth": 8})[0]["starts"]
    assert other[2] >= 6
    replica = run_ranks(4, limited, [100.0, 0.2, 100.0, 100.0], {}, {"depth": 8, "batch": 24})[0]["starts"]
    assert replica[1] <= 2  # the smallest of a stage's ranks counts
    (alone,) = run_ranks(1, train, None, {"width": 64, "depth": 8})
    same_bits(ranks, alone)


def test_two_stages_of_a_rank_fit_together(here):
    """Each of them alone would fit with more blocks."""
    run = {"depth": 8, "accumulate": 4}
    assert run_ranks(2, limited, [0.2, 100.0], {"schedule": "zbv"}, run)[0]["starts"][1::2] == [1, 7]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_model_that_fits_nowhere_is_refused_with_the_numbers(here, schedule):
    found = run_ranks(2, limited, [0.02, 0.02], {"schedule": schedule}, {})
    assert found[0] == found[1] and "\n" not in found[0]
    for words in ("callbacks.pipeline.cut=auto: no cut fits into memory", " MiB of 0.0", "optimizer state", "use more"):
        assert words in found[0]
    explicit = run_ranks(2, limited, [0.05, 0.05], {"cut": [3]}, {})  # the user's own cut
    assert explicit[0]["starts"] == [0, 3]


def test_two_stages_of_a_rank_are_refused_by_half_of_its_limit(here):
    """Each of them alone fits into the whole."""
    run = {"depth": 4, "accumulate": 4}
    (found, _) = run_ranks(2, limited, [0.1, 0.1], {"schedule": "zbv"}, run)
    assert " MiB of 0.05, half of its rank's 0.1 for two stages (" in found
    assert 0.05 < float(found.partition(" needs ")[2].split()[0]) < 0.1


def measured(place: Place, others: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The bytes that are foreseen for this rank's stage, and those that it has after the last step."""
    found: dict[str, Any] = {}
    make = module.stage_memory

    def keep(*args: Any) -> Any:
        found["memory"] = memory = make(*args)
        return memory

    module.stage_memory = keep
    try:
        ended = train(place, {"stages": 3}, {"depth": 6, "others": others, **run})
    finally:
        module.stage_memory = make
    starts = [*ended["starts"], 6]
    stage = place.rank * 3 // place.world
    return {
        **ended,
        "saved": found["memory"].sizes.saved,
        "need": found["memory"].need(stage, starts[stage], starts[stage + 1]),
    }


def test_the_bytes_foreseen_are_those_of_the_stage(here):
    ranks = run_ranks(3, measured, {}, {})
    for rank in ranks:
        elements = sum(value.size for value in rank["weights"].values())
        steps = 4 * len(rank["weights"])  # AdamW counts steps per parameter
        assert rank["need"][0] == pytest.approx(4 * 4 * elements, rel=0.01)
        assert rank["state_bytes"] == 2 * 4 * elements + steps


@pytest.mark.slow
def test_an_average_shard_and_recomputation_change_the_need(here):
    plain = run_ranks(3, measured, {}, {})
    averaged = run_ranks(3, measured, {"ema": EMA}, {})[0]
    elements = sum(value.size for value in averaged["weights"].values())
    assert averaged["need"][0] / elements == pytest.approx(20, rel=0.01)  # one copy more
    recomputed = run_ranks(3, measured, {"activation_checkpoint": ActivationCheckpoint}, {})
    ends = plain[0]["saved"][-1]
    assert plain[0]["saved"] == [2 * 8 * 4, *[2 * 2 * 16 * 4] * 6, ends]  # 2 rows, width 16: input and output
    assert recomputed[0]["saved"] == [2 * 8 * 4, *[2 * 16 * 4] * 6, ends]
    ranks = run_ranks(6, measured, {}, {"batch": 24})
    sharded = run_ranks(6, measured, {"shard": Shard}, {"batch": 24})
    for rank, each in ((ranks[0], 16), (sharded[0], 12)):  # half of the moments
        elements = sum(value.size for value in rank["weights"].values())
        assert rank["need"][0] / elements == pytest.approx(each, rel=0.01)


def test_saved_bytes_of_the_trial_are_those_of_a_pass(here):
    """A tensor that two blocks save counts once, as it lies in memory once."""
    net = Toy(depth=4).model()
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not any(tensor.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in net.parameters()):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.ones(7, 8)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x).square().mean()
    trial = try_whole(net, list(net.blocks), lambda: net(x).square().mean(), torch.device("cpu"))  # pyright: ignore
    assert trial is not None
    assert sum(trial.saved) == sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
