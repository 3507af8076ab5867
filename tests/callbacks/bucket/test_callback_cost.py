"""The sizes of buckets in MiB that the cost model takes from the knobs."""

import pytest
from support.costs import choose, machine, setup

from trainer.cost.buckets import limits


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [({"mib": 4}, [4, 4]), ({"mib": "auto", "first_mib": 2}, [2, 25]), ({"mibs": [1, 2, 3]}, [1, 2, 3])],
)
def test_sizes(knobs: dict[str, object], expected: list[float]) -> None:
    assert limits(setup(machine(background=False), choose({"bucket": knobs}))) == expected
