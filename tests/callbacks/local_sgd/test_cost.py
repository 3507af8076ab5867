"""Steps of local_sgd by hand; a rank computes for 0.61 s."""

import pytest
from support.costs import MIB, choose, machine, setup

from trainer.cost.machine import Link
from trainer.cost.passes import passes
from trainer.cost.setup import StepCost


def steps(knobs: dict[str, object], cores: float = 2.0, cpu_s: float = 0.0, latency_s: float = 0.0) -> StepCost:
    link = Link(latency_s, 10 * MIB, cpu_s / 20 / MIB)  # a synchronisation takes a second
    found = setup(machine(across=link, cores=cores), choose({"local_sgd": knobs}))
    cost = found.costs["local_sgd"].step(found, passes(found), codec=True)
    assert cost is not None
    return cost


def test_a_synchronisation_counts_once_in_every_steps() -> None:
    found = steps({"every": 5})
    assert found.seconds == pytest.approx(0.61 + 1.0 / 5) and found.sent_bytes == pytest.approx(10 * MIB / 5)


def test_delay_hides_it() -> None:
    assert steps({"every": 5, "delay": 2}).seconds == pytest.approx(0.61)
    assert steps({"every": 5, "delay": 1}).seconds == pytest.approx(0.61 + (1.0 - 0.61) / 5)


def test_delay_hides_no_processor_time_of_a_single_core() -> None:
    assert steps({"every": 5, "delay": 2}, cores=1.0, cpu_s=0.5).seconds == pytest.approx(0.61 + 0.5 / 5)


def test_fragments_share_the_bytes_and_each_has_the_delay() -> None:
    assert steps({"every": 6, "fragments": 3}).seconds == pytest.approx(0.61 + 1.0 / 6)
    assert steps({"every": 6, "fragments": 3, "delay": 1}).seconds == pytest.approx(0.61)
    assert steps({"every": 6, "fragments": 3}, latency_s=0.05).seconds == pytest.approx(0.61 + (1.0 + 3 * 0.1) / 6)
