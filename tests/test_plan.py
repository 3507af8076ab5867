"""A run is decided once: ranks take the decisions as values, and check only that they see the same."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.optim.schedule import Constant
from trainer.plan import Plan, RunSpec, identity_without_observers, refuse_other_recipe, stateful
from trainer.process.environment import Place


def make_plan(recipe: Any, callbacks: Any = (), place: Place | None = None, spec: RunSpec | None = None) -> Plan:
    return Plan(
        recipe, dict(callbacks) if callbacks == () else callbacks, Constant(),
        batch=12, micro_batch=2, accumulate=None, options=Options(max_epochs=2, devices=3), data=DataOptions(workers=0),
        place=place or Place(world=3), each=lambda value: [value], spec=spec,
    )  # fmt: skip


def test_ranks_do_not_decide_again(monkeypatch):
    decided = make_plan(Toy()).spec
    assert (decided.world, decided.micro, decided.accumulate, decided.max_steps) == (3, 2, 2, 16)
    spec = RunSpec(**json.loads(json.dumps(asdict(decided))))
    for name in ("split_batch", "refuse_other_ranks", "refuse_more", "verify"):
        monkeypatch.setattr(f"trainer.plan.{name}", lambda *args, **how: pytest.fail("decides again"))
    monkeypatch.setattr(Plan, "_max_steps", lambda plan: pytest.fail("decides again"))
    plan = make_plan(Toy(), place=Place(1, 3, 1, 3), spec=spec)
    assert plan.spec == decided and (plan.micro, plan.accumulate, plan.max_steps) == (2, 2, 16)


def test_a_rank_that_sees_other_data_is_refused():
    spec = make_plan(Toy()).spec
    with pytest.raises(DataError, match=r"^recipe\.data: has changed since the run was planned; restore"):
        make_plan(Toy(samples=48), place=Place(1, 3, 1, 3), spec=spec)


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
