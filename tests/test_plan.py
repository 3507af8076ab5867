"""A run is decided once: ranks take the decisions as values, and check only that they see the same."""

import json
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import pytest
from support.messages import refuses
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.checks.plan import settings_in_common
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.optim.schedule import Constant
from trainer.plan import Plan, RunSpec
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
    monkeypatch.setattr(Plan, "_last_step", lambda plan: pytest.fail("decides again"))
    plan = make_plan(Toy(), place=Place(1, 3, 1, 3), spec=spec)
    assert plan.spec == decided and (plan.micro, plan.accumulate, plan.max_steps) == (2, 2, 16)


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [("optimizer.lr", 0.1, 0.01), ("recipe.dropout", 0.0, 0.5), ("recipe.lora.r", None, 8), ("schedule.warmup", 2, 3)],
)
def test_a_rank_with_another_command_is_named(key, first, second):
    """Two terminals, of which one command was not edited."""
    with pytest.raises(ConfigError, match=rf"^{key} is {first} on rank 0 and {second} on rank 1; start all ranks with"):
        plan_of_two({} if first is None else {key: first}, {key: second})


def test_a_node_may_have_paths_interfaces_and_loggers_of_its_own():
    class Notes(Callback):
        role = Role.OBSERVE

    own = {"recipe.text": "/mnt/a", "nccl.interface": "eth0", "callbacks.notes.name": "a", "recipe.width": 4}
    other = {"recipe.text": "/mnt/b", "nccl.interface": "ens1", "callbacks.notes.name": "b", "recipe.width": 4}
    assert plan_of_two(own, other, {"notes": Notes()}).spec.world == 2


def plan_of_two(own: dict[str, Any], other: dict[str, Any], callbacks: Any = MappingProxyType({})) -> Plan:
    """Return the plan of rank 0, whose settings are `own`, with a rank 1 that differs by its settings alone."""
    mine, theirs = (settings_in_common(settings, callbacks) for settings in (own, other))

    def each(value: Any) -> list[Any]:
        compared = isinstance(value, dict) and "trainer.seed" in value
        return [value, {key: value[key] for key in value.keys() - mine.keys()} | theirs if compared else value]

    return Plan(
        Toy(), callbacks, Constant(), batch=12, micro_batch=None, accumulate=None, options=Options(max_epochs=2),
        data=DataOptions(workers=0), place=Place(world=2), each=each, settings=own,
    )  # fmt: skip


def test_a_rank_that_sees_other_data_is_refused():
    spec = make_plan(Toy()).spec
    with refuses("recipe.data", "changed", kind=DataError):
        make_plan(Toy(samples=48), place=Place(1, 3, 1, 3), spec=spec)
