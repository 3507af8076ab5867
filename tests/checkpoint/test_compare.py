"""Settings of two manifests: what counts as another, and how it is shown."""

import json
import math
from typing import Any

import pytest

from trainer.checkpoint.compare import differences, flat, plain


def manifest(settings: dict[str, Any], ddp: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"settings": settings, "ddp": ddp or {}, "versions": {"torch": "2.11"}}


def test_settings_are_those_of_the_sections_by_their_full_names():
    sections = {key: {} for key in ("recipe", "callbacks", "schedule", "nccl")}
    config = {**sections, "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "trainer": {"max_steps": 3}}
    assert flat(config) == {"optimizer.lr": 0.1, "optimizer.betas": [0.9, 0.99]}
    settings = plain({"a": math.inf, "b": (1, 2), "c": print})
    assert settings == {"a": "Infinity", "b": [1, 2], "c": repr(print)} == json.loads(json.dumps(settings))


@pytest.mark.parametrize(
    ("was", "now", "lines"),
    [
        ({"optimizer.lr": 0.1}, {"optimizer.lr": 0.1}, []),
        ({"optimizer.lr": 0.1}, {"optimizer.lr": 0.2}, ["optimizer.lr was 0.1 and is 0.2"]),
        ({"schedule.floor": 1, "schedule.warmup": 2}, {"schedule.floor": 1}, ["schedule.warmup was 2 and is null"]),
        ({"callbacks.ema.decay": 0.9}, {"recipe.width": 3}, []),  # neither has others of that section
        (
            {"callbacks.a._target_": "trainer.callbacks.a.A"},
            {"callbacks.a._target_": "trainer.callbacks.a.callback.A"},
            [],
        ),  # our own class has moved
        (
            {"callbacks.a._target_": "mine.A"},
            {"callbacks.a._target_": "other.A"},
            ["callbacks.a._target_ was mine.A and is other.A"],
        ),
        ({"recipe.x": "a\x1b[2J"}, {"recipe.x": "b\n"}, [r"recipe.x was a\u001b[2J and is b\n"]),
        ({"recipe.x": "a"}, {"recipe.x": "b" * 200}, [f"recipe.x was a and is {'b' * 97}..."]),
    ],
)
def test_what_differs_is_a_line(was, now, lines):
    assert differences(manifest(was), manifest(now)) == lines


def test_options_of_ddp_have_the_name_that_the_command_knows():
    assert differences(manifest({}, {"static_graph": True}), manifest({}, {"static_graph": False})) == [
        "trainer.ddp.static_graph was true and is false"
    ]
    assert differences({}, manifest({}, {"static_graph": False})) == []  # an older manifest had none of them
