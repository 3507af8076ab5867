"""Whole predictions: parts add up, a choice counts, and no combination is forgotten."""

from dataclasses import replace

import pytest
from support.costs import FAST, MIB, choose, machine, predicted

from trainer.cost.machine import Link

CHOICES = [
    {},
    {"overlap": {}},
    {"overlap": {}, "grad_compress": {"codec": "int8"}},
    {"local_sgd": {"every": 4, "delay": 2, "fragments": 2}, "grad_compress": {"codec": "topk"}},
    {"onebit_adam": {}},
    {"hierarchical": {}, "grad_compress": {"level": "inter"}},
    {"shard": {"stage": 1}},
    {"shard": {"stage": 2}},
    {"shard": {"stage": 3}},
    {"shard": {"stage": 3, "hybrid": True}},
    {"pipeline": {"schedule": "interleaved"}, "activation_checkpoint": {}},
    {"pipeline": {}, "shard": {}},
    {"optimizer_in_backward": {}, "bucket": {"mib": "auto"}},
    {"auto_batch": {}, "compile": {}},
]


@pytest.mark.parametrize("callbacks", CHOICES, ids=lambda choice: "+".join(choice) or "ddp")
@pytest.mark.parametrize(
    "own", [machine(8, 4), machine(8, 4, Link(1e-4, 1e8, 3e-9), 0.5)], ids=["cores", "half a core"]
)
def test_parts_add_up_and_a_faster_link_is_no_slower(callbacks: dict[str, dict[str, object]], own) -> None:
    found = predicted(own, choose(callbacks, accumulate=2), batch=32)
    assert sum(found.parts.values()) == pytest.approx(found.step_s) and min(found.parts.values()) > -1e-9
    assert found.memory_bytes > 0 and (found.sent_bytes > 0 or "pipeline" in callbacks)
    assert predicted(replace(own, across=FAST), choose(callbacks, accumulate=2), batch=32).step_s <= found.step_s + 1e-9


def test_one_rank_computes_and_no_more() -> None:
    found = predicted(machine(1), batch=2, other_s=0.04)
    assert found.step_s == pytest.approx(0.6 + 0.01 + 0.04) and found.sent_bytes == 0
    assert found.parts["communication"] == pytest.approx(0, abs=1e-12)


def test_shard_steps_a_part_of_the_parameters() -> None:
    """The fullest of 4 owners has 3 of 10 equal parameters."""
    assert predicted(machine(4, across=FAST), choose({"shard": {}}), batch=8).step_s == pytest.approx(0.6 + 0.01 * 0.3)


def test_waiting_for_data() -> None:
    def data(cores: float, workers: int, busy: float = 1.0) -> float:
        own = machine(1, cores=cores)
        return predicted(own, choose(data__workers=workers), batch=2, data_s=0.5, data_cpu=busy).parts["data"]

    assert data(4.0, 0) == 1.0 and data(4.0, 1) == pytest.approx(1.0 - 0.61) and data(4.0, 2) == 0
    assert data(1.0, 2) == pytest.approx(1.0)  # one core computes and loads in turns
    assert data(1.0, 2, busy=0.25) == pytest.approx(0.25) and data(1.0, 1, busy=0.0) == pytest.approx(1.0 - 0.61)


def test_ranks_wait_for_the_slowest() -> None:
    waits = [predicted(machine(n, across=FAST), batch=2 * n, jitter=0.1).parts["communication"] for n in (2, 64, 4096)]
    assert 0.03 < waits[0] < waits[1] < waits[2] < 0.25


def test_auto_batch_takes_the_most_that_fits() -> None:
    """16 samples keep 1,000 bytes each; 5 of them fit."""
    own = machine(1, memory_bytes=40.0 * MIB + 5500)
    assert predicted(own, choose({"auto_batch": {}}), batch=16, pass_s=1.0).parts["compute"] == pytest.approx(
        16 * 0.3 + 4
    )


def test_unknown_parts_are_named() -> None:
    assert any("nan_guard" in line for line in predicted(machine(), choose({"nan_guard": {}})).unknown)
