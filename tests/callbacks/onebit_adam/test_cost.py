"""A step of onebit_adam after its warm-up by hand."""

import pytest
from support.costs import CODECS, MIB, choose, machine, setup

from trainer.cost.machine import CodecCost, Link
from trainer.cost.passes import passes


def test_nothing_hides_the_signs_of_onebit_adam() -> None:
    codecs = {**CODECS, "sign": CodecCost(1e-8, 1e-8)}
    found = setup(machine(across=Link(0.0, 1e6, 0.0), codecs=codecs), choose({"onebit_adam": {}}))
    cost = found.costs["onebit_adam"].step(found, passes(found), codec=True)
    assert cost is not None
    size = 10 * MIB / 32 + 4 * 10  # a bit an element, a scale a parameter
    assert cost.sent_bytes == pytest.approx(size)
    assert cost.seconds == pytest.approx(0.61 + size / 1e6 + 10 * MIB * 1e-8 * (1.5 + 3.5))
