"""The stages of a pipeline: the share of the slowest, and the parameters of the fullest."""

import pytest
from support.costs import choose, machine, setup

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
