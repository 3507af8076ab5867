"""Steps of local_sgd, onebit_adam and pipelines by hand; a rank computes for 0.61 s."""

import pytest
from support.costs import CODECS, MIB, choose, machine, setup

from trainer.cost.machine import CodecCost, Link
from trainer.cost.passes import SPLIT, passes
from trainer.tools.cost_model.strategies import gathered_weights, idle, local_sgd, onebit_adam, pipeline


def steps(knobs: dict[str, object], cores: float = 2.0, cpu_s: float = 0.0, latency_s: float = 0.0):
    link = Link(latency_s, 10 * MIB, cpu_s / 20 / MIB)  # a synchronisation takes a second
    found = setup(machine(across=link, cores=cores), choose({"local_sgd": knobs}))
    return local_sgd(found, passes(found), codec=True)


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


def test_nothing_hides_the_signs_of_onebit_adam() -> None:
    codecs = {**CODECS, "sign": CodecCost(1e-8, 1e-8)}
    found = setup(machine(across=Link(0.0, 1e6, 0.0), codecs=codecs), choose({"onebit_adam": {}}))
    cost = onebit_adam(found, passes(found), codec=True)
    size = 10 * MIB / 32 + 4 * 10  # a bit an element, a scale a parameter
    assert cost.sent_bytes == pytest.approx(size)
    assert cost.seconds == pytest.approx(0.61 + size / 1e6 + 10 * MIB * 1e-8 * (1.5 + 3.5))


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ("gpipe", 3 / 11),
        ("1f1b", 3 / 11),
        ("interleaved", 1.5 / 9.5),
        ("zero_bubble", 1 / 9),
        ("zbv", 0),
        ("pipedream_2bw", 0),
    ],
)
def test_the_bubble_s_share_of_a_step(schedule: str, share: float) -> None:
    """(p - 1) / (m + p - 1) with 4 stages and 8 micro-batches; half and a third as long with other schedules."""
    found = setup(machine(4), choose({"pipeline": {"stages": 4, "schedule": schedule}}, accumulate=8), batch=8)
    assert idle(found) / (1 + idle(found)) == pytest.approx(share)


def test_messages_of_a_pipeline() -> None:
    found = setup(machine(2), choose({"pipeline": {}}, accumulate=4), batch=8, boundary_bytes=1000.0)
    assert pipeline(found).sent_bytes == 2 * 4 * 2 * 1000
    assert pipeline(found).seconds == pytest.approx(2 * 2000 / 1e6)
    tied = setup(machine(2), choose({"pipeline": {}}, accumulate=4), batch=8, tied_bytes=5000.0)
    assert pipeline(tied) == (pytest.approx(5000 / 1e6), 5000)
    zbv = choose({"pipeline": {"schedule": "zbv"}}, accumulate=4)
    assert pipeline(setup(machine(2), zbv, batch=8, tied_bytes=5000.0)) == (0, 0)  # both ends are on one rank


def test_stages_that_are_not_equal() -> None:
    """The slower of two has 0.6 of the passes. Of 4 micro-batches, it waits for one on the other."""
    parts = (0.0, 0.2, 0.2, 0.2, 0.2, 0.2)
    found = setup(machine(2), choose({"pipeline": {}}, accumulate=4), parts=parts)
    compute_s = passes(found).compute_s
    assert compute_s == pytest.approx(0.6 * 4 * 0.3) and idle(found) * compute_s == pytest.approx(0.4 * 0.3)
    split = setup(machine(2), choose({"pipeline": {"schedule": "zbv"}}, accumulate=4))
    assert passes(split).compute_s == pytest.approx(4 * (0.1 + SPLIT * 0.2) / 2)


def test_owners_gather_their_weights() -> None:
    """The fullest of 4 owners has 3 of 10 equal parameters, and each rank sends as much."""
    found = setup(machine(4, codecs={**CODECS, "none": CodecCost(1e-9, 1e-9)}), choose({"shard": {}}))
    cost = gathered_weights(found)
    assert cost.sent_bytes == 0.75 * 12 * MIB
    assert cost.seconds == pytest.approx(cost.sent_bytes / 1e6 + 2 * 10 * MIB * 1e-9)
    assert found.stepped == 0.3 and passes(found).optimizer_s == pytest.approx(0.3 * 0.01)


def test_a_gather_that_nothing_hides_may_be_limited_by_the_processor() -> None:
    found = setup(machine(4, across=Link(0.0, 1e6, 2e-6), cores=0.5), choose({"shard": {}}))
    assert gathered_weights(found).seconds == pytest.approx(0.75 * 12 * MIB * 2 * 2e-6 / 0.5)
