"""Roles: which callbacks can't run together because they would do the same."""

import pytest

from trainer.callback import Callback, Role, arrange
from trainer.errors import ConfigError


class Both(Callback):
    role = Role.OPTIMIZER
    also = (Role.COMPRESS,)


class Compress(Callback):
    role = Role.COMPRESS


class Measure(Callback):
    role = Role.MEASURE
    also = (Role.OBSERVE,)


@pytest.mark.parametrize("other", [Compress, Both])
def test_a_role_that_a_callback_has_beside_its_own_is_taken(other):
    for names in (("one", "two"), ("two", "one")):  # the order of names decides nothing
        with pytest.raises(ConfigError, match=r"(one|two) and (one|two) both have the role COMPRESS: remove one"):
            arrange(dict(zip(names, (Both(), other()), strict=True)), set())


def test_it_runs_at_its_own_role_and_shares_what_is_shared():
    callbacks = {"both": Both(), "measure": Measure(), "observe": Callback(), "second": Measure()}
    assert list(arrange(callbacks, set())) == ["both", "measure", "second", "observe"]
