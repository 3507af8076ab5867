"""A pipeline: the share of its slowest stage, the parameters of the fullest, its idle time and its messages."""

import pytest
from support.costs import choose, machine, setup

from trainer.callbacks.pipeline.cost import SPLIT, exchanged, idle
from trainer.cost.passes import passes


@pytest.mark.parametrize(
    ("schedule", "parts", "share"),
    [
        ("1f1b", (0, 1, 1, 1, 1, 0), 0.5),
        ("1f1b", (1, 2, 2, 2, 2, 3), 7 / 12),  # 1 + 2 + 2 and 2 + 2 + 3: no other cut is better
        ("1f1b", (0, 1, 1, 1, 1, 4), 5 / 8),  # a stage has a block, whatever comes after
        ("interleaved", (0, 1, 1, 1, 1, 2), 4 / 6),  # stages 1, 1, 1, 3; a rank has the first and the third
        ("zbv", (0, 1, 1, 1, 1, 2), 4 / 6),  # and here the first and the last
        ("zero_bubble", (1, 1, 1, 1), 0.5),  # two blocks: such a run is refused
    ],
)
def test_the_share_of_the_slowest_stage(schedule: str, parts: tuple[float, ...], share: float) -> None:
    found = setup(machine(), choose({"pipeline": {"schedule": schedule}}), parts=parts)
    assert found.stage_share == pytest.approx(share)
    assert setup(machine(), parts=parts).stage_share == 1


def test_the_parameters_of_the_fullest_stage_and_a_cut_of_the_user_s() -> None:
    """Ten equal layers: four before the blocks, one in each of four blocks, two after."""
    known = {"parts": (0.0, 1, 1, 1, 1, 0), "part_of": (0, 0, 0, 0, 1, 2, 3, 4, 5, 5)}
    own = setup(machine(), choose({"pipeline": {}}), **known)
    assert own.own == (0, 1, 2, 3, 4, 5) and passes(own).optimizer_s == pytest.approx(0.6 * 0.01)
    cut = setup(machine(), choose({"pipeline": {"cut": [1]}}), **known)
    assert cut.stage_share == 3 / 4 and cut.own in ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))


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
    assert idle(found, schedule) / (1 + idle(found, schedule)) == pytest.approx(share)


def test_messages_of_a_pipeline() -> None:
    found = setup(machine(2), choose({"pipeline": {}}, accumulate=4), batch=8, boundary_bytes=1000.0)
    assert exchanged(found, "1f1b").sent_bytes == 2 * 4 * 2 * 1000
    assert exchanged(found, "1f1b").seconds == pytest.approx(2 * 2000 / 1e6)
    tied = setup(machine(2), choose({"pipeline": {}}, accumulate=4), batch=8, tied_bytes=5000.0)
    assert exchanged(tied, "1f1b") == (pytest.approx(5000 / 1e6), 5000)
    zbv = choose({"pipeline": {"schedule": "zbv"}}, accumulate=4)
    assert exchanged(setup(machine(2), zbv, batch=8, tied_bytes=5000.0), "zbv") == (0, 0)  # both ends are on one rank


def test_stages_that_are_not_equal() -> None:
    """The slower of two has 0.6 of the passes. Of 4 micro-batches, it waits for one on the other."""
    parts = (0.0, 0.2, 0.2, 0.2, 0.2, 0.2)
    found = setup(machine(2), choose({"pipeline": {}}, accumulate=4), parts=parts)
    compute_s = passes(found).compute_s
    assert compute_s == pytest.approx(0.6 * 4 * 0.3) and idle(found, "1f1b") * compute_s == pytest.approx(0.4 * 0.3)
    split = setup(machine(2), choose({"pipeline": {"schedule": "zbv"}}, accumulate=4))
    assert passes(split).compute_s == pytest.approx(4 * (0.1 + SPLIT * 0.2) / 2)
