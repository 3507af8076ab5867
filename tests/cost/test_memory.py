"""Bytes that were counted on real ranks, as the cards tell: P = 40 MiB of parameters, AdamW's state of 2 P."""

import pytest
from support.costs import MIB, WORKLOAD, choose, machine, setup

from trainer.cost.memory import held, predict_memory
from trainer.cost.setup import Setup

P = 10 * MIB


def model_bytes(setup: Setup) -> float:
    return sum(held(setup)[:4])


@pytest.mark.parametrize(
    ("callbacks", "copies"),
    [
        ({}, 5),  # parameters, gradients, DDP's buckets, two moments
        ({"overlap": {}}, 4),
        ({"local_sgd": {}}, 4),
        ({"shard": {"stage": 1}}, 3.6),  # the fullest owner has three parameters of ten
        ({"shard": {"stage": 2}}, 1.9),
        ({"optimizer_in_backward": {}}, 3.4),  # four buckets of ten
    ],
)
def test_copies_of_the_parameters(callbacks: dict[str, dict[str, object]], copies: float) -> None:
    assert model_bytes(setup(machine(4), choose(callbacks, trainer__ddp__bucket_mib=1))) == pytest.approx(copies * P)


def test_rows_of_stage_3_and_two_units() -> None:
    found = model_bytes(setup(machine(4), choose({"shard": {"stage": 3}}, trainer__ddp__bucket_mib=1)))
    assert found == pytest.approx(P + 2 * MIB)


def test_one_rank_has_no_buckets() -> None:
    assert model_bytes(setup(machine(1))) == 4 * P


def test_views_save_a_copy() -> None:
    assert model_bytes(setup(machine(2), choose(trainer__ddp__gradient_as_bucket_view=True))) == 4 * P


@pytest.mark.parametrize(
    ("callbacks", "copies"),
    [
        ({"grad_compress": {"codec": "topk"}}, 1),
        ({"grad_compress": {"codec": "topk", "feedback": False}}, 0),
        ({"grad_compress": {"codec": "dgc", "momentum": 0.9}}, 2),
        ({"grad_compress": {"codec": "int8", "feedback": True}}, 1),
        ({"local_sgd": {}}, 2),
        ({"local_sgd": {"outer": "nesterov", "delay": 2}}, 4),
        ({"onebit_adam": {}}, 3.25),
        ({"ema": {}}, 1),
    ],
)
def test_what_callbacks_keep(callbacks: dict[str, dict[str, object]], copies: float) -> None:
    assert held(setup(machine(4), choose(callbacks))).other == pytest.approx(copies * P)


def test_activations_of_a_micro_batch() -> None:
    own = setup(machine(1), choose(micro_batch=2), batch=8)
    assert predict_memory(own) - model_bytes(own) == pytest.approx(2 * 1000)


@pytest.mark.parametrize(("schedule", "count"), [("gpipe", 8), ("1f1b", 2), ("pipedream_2bw", 2)])
def test_micro_batches_in_flight(schedule: str, count: int) -> None:
    own = setup(machine(2), choose({"pipeline": {"schedule": schedule}}, accumulate=8), batch=8)
    assert own.costs["pipeline"].in_flight(own) == count
    assert model_bytes(own) == (2 if schedule != "pipedream_2bw" else 3) * P and WORKLOAD.state_bytes == 4 * P
