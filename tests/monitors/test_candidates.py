"""Callbacks that a run would take beside its own."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.callbacks.overlap import Overlap
from trainer.callbacks.shard import Shard
from trainer.monitors.candidates import accepts


@pytest.mark.parametrize(
    ("own", "features", "name", "knobs", "taken"),
    [
        ({}, set(), "overlap", {}, True),
        ({}, {"clip"}, "overlap", {}, False),
        ({"own": Overlap()}, set(), "overlap", {}, False),
        ({"own": Overlap()}, set(), "compile", {}, False),
        ({}, {"bf16_params"}, "shard", {"stage": 3}, False),
        ({}, {"bf16_params"}, "shard", {"stage": 2}, True),
        ({"shard": Shard(1)}, set(), "grad_compress", {"codec": "int8"}, True),
        ({}, set(), "grad_compress", {"codec": "mp3"}, False),
    ],
)
def test_what_arrange_takes(own, features, name, knobs, taken):
    trainer: Any = SimpleNamespace(callbacks=own, plan=SimpleNamespace(features=lambda: features))
    assert accepts(trainer, name, **knobs) == taken
