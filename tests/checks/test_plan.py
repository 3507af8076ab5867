"""Checkpoints of other runs are refused; callbacks that only look on are no part of a run's identity."""

from typing import Any

import pytest
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.checks.plan import identity_without_observers, refuse_other_recipe, stateful
from trainer.errors import ConfigError


def test_another_recipes_checkpoint_is_named():
    manifest = {"settings": {"recipe._target_": "recipes.bert.Bert"}, "identity": {"data": "a"}}
    with pytest.raises(ConfigError, match="the checkpoint was written with recipe Bert, and this run has recipe Toy"):
        refuse_other_recipe(Toy(), manifest, {"data": "b"}, [])
    refuse_other_recipe(Toy(), manifest, {"data": "b"}, ["data"])
    refuse_other_recipe(Toy(), manifest, {"data": "a"}, [])


def test_a_resume_compares_callbacks_that_change_weights():
    class Watch(Callback):
        pass

    class Remember(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {}

    class Swap(Callback):
        role = Role.MODEL

    class Layout(Swap):
        role = Role.SHARD

        def distribute(self, trainer, model):
            raise NotImplementedError

    callbacks = {"watch": Watch(), "remember": Remember(), "swap": Swap(), "layout": Layout()}
    assert stateful(callbacks) == ["swap"]
    saved = {"identity": {"seed": 0, "callbacks": ["remember", "step_timer", "early_stop", "gone", "swap"]}}
    saved["settings"] = {
        "callbacks.step_timer._target_": "trainer.monitors.step_timer.StepTimer",
        "callbacks.early_stop._target_": "trainer.callbacks.early_stop.EarlyStop",
        "callbacks.gone._target_": "mine.Gone",
    }  # of an older version
    assert identity_without_observers(saved, callbacks) == {"seed": 0, "callbacks": ["gone", "swap"]}
    assert identity_without_observers({"identity": {"seed": 0}}, callbacks) == {"seed": 0}
