"""Which settings `evaluate` and `predict` take."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.errors import ConfigError
from trainer.tools.inference.stored import on_ranks


@pytest.mark.parametrize(
    "change, way_out",
    [
        ("trainer.devices=2", "give --devices 2"),
        ("micro_batch=8", "give --micro-batch 8"),
        ("trainer.limit_batches.validation=5", "leave it out"),
        ("optimizer.lr=1", "leave it out"),
    ],
)
def test_a_setting_that_changes_nothing_is_refused(change, way_out):
    given = SimpleNamespace(checkpoint="x", changes=["recipe.val=x", "data.workers=0", "trainer.seed=1", change])
    with pytest.raises(ConfigError, match=rf"^{re.escape(change)}: changes nothing here; {way_out}$"):
        on_ranks(cast("Any", given), print)
