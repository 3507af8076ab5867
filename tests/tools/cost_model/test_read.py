"""Choices are checked against the YAMLs; what is not modelled is said."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.costs import choose, machine, setup

from trainer.callback import Callback
from trainer.config.folders import CONF
from trainer.cost.workload import Choice
from trainer.errors import ConfigError
from trainer.tools.cost_model.read import costs_of, defaults

CALLBACKS = sorted(path.stem for path in (CONF / "callbacks").glob("*.yaml"))


PARTLY = {"compile", "ema", "hetero_batch", "nan_guard", "pipeline", "swa"}  # what the model leaves out of them is said


@pytest.mark.parametrize("name", CALLBACKS)
def test_no_callback_is_ignored_silently(name: str) -> None:
    said = any(name in line for line in setup(machine(4), choose({name: {}})).unknown)
    assert said == (name in PARTLY) and costs_of({name: {}}, ())[name] is not None


def test_a_callback_of_the_user_s_is_named() -> None:
    assert "callbacks.mine" in setup(machine(), choose({"mine": {"knob": 1}})).unknown[0]


@pytest.mark.parametrize(
    ("name", "said"), [("Watch", None), ("Wrong", "returned int"), ("Failing", "RuntimeError: boom")]
)
def test_the_costs_of_a_user_s_callbacks(name: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks on has seconds, too, which are not modelled."""
    monkeypatch.setitem(sys.modules, "outside.watch", SimpleNamespace(Watch=Watch, Wrong=Wrong, Failing=Failing))
    monkeypatch.setattr(Watch, "__module__", "outside.watch")
    node = {"_target_": f"outside.watch.{name}"}
    if said is None:
        assert costs_of({"mine": node}, ("outside", __name__)) == {"mine": None}
        return
    with pytest.raises(ConfigError, match=rf"^callbacks\.mine.*{said}"):
        costs_of({"mine": node}, ("outside", __name__))


class Watch(Callback):
    pass


class Wrong(Callback):
    def cost(self) -> Any:
        return 3


class Failing(Callback):
    def cost(self) -> Any:
        raise RuntimeError("boom")


def test_defaults_are_the_yaml_s() -> None:
    known = defaults("local_sgd")
    assert known is not None and known["every"] == 8
    assert setup(machine(), choose({"local_sgd": {"fragments": 3}})).every == 8


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (choose({"local_sgd": {"evry": 3}}), "callbacks.local_sgd.evry=3: no such knob; did you mean every"),
        (choose(trainer__ddp__bucket_mb=3), "trainer.ddp.bucket_mb=3: no such setting; did you mean"),
        (choose({"pipeline": {"stages": 3}}), "callbacks.pipeline.stages=3: does not divide 4"),
    ],
)
def test_what_does_not_exist_is_refused(choice: Choice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setup(machine(4), choice)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data__workers": 3, "micro_batch": 1, "nccl__algo": "Tree"}, 0),
        ({"nccl__algo": "PAT"}, 1),
        ({"nccl__buffer_mib": 8}, 1),
        ({"trainer__clip_norm": 1.0}, 1),
        ({"trainer__precision": "bf16"}, 1),
    ],
)
def test_settings_without_a_model_are_said(settings: dict[str, Any], said: int) -> None:
    assert len(setup(machine(), choose(**settings)).unknown) == said


def test_a_codec_without_a_measured_cost_is_said() -> None:
    assert "codec int8" in setup(machine(codecs={}), choose({"grad_compress": {"codec": "int8"}})).unknown[0]
