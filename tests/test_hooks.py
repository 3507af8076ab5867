"""Which hooks are active, and in which order they wrap and run, without a trainer."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from trainer.callback import UNLOGGED, Callback, only_logged
from trainer.errors import ConfigError
from trainer.hooks import Hooks

TRAINER: Any = SimpleNamespace(seen=[])


class Outer(Callback):
    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        return nn.Sequential(model)

    def on_step_end(self, trainer) -> None:
        trainer.seen.append(type(self).__name__)


class Rare(Outer):
    @only_logged
    def on_step_end(self, trainer) -> None:
        super().on_step_end(trainer)


class Sums(Outer):
    communicates = True
    provides = frozenset({"defers"})


def test_hooks_wrap_and_run_in_the_order_of_the_callbacks():
    hooks = Hooks({"outer": Outer(), "rare": Rare(), "sums": Sums()}, world=2)
    inner = nn.Identity()
    assert hooks.wrap("wrap_model", TRAINER, inner)[0][0][0] is inner and hooks.wrap("wrap_reduce", TRAINER, 3) == 3
    hooks.emit("on_step_end", TRAINER)
    hooks.emit("on_flush", TRAINER)
    assert TRAINER.seen == ["Outer", "Rare", "Sums"] and hooks.defers
    assert [type(call.__self__) for call in hooks[UNLOGGED]] == [Outer, Sums]


def test_what_only_communicates_is_not_active_on_one_rank():
    hooks = Hooks({"outer": Outer(), "sums": Sums()}, world=1)
    assert [type(call.__self__) for call in hooks["on_step_end"]] == [Outer] and not hooks.defers


def test_a_hook_that_returns_nothing_is_named():
    class Forgets(Callback):
        def wrap_model(self, trainer, model: nn.Module) -> Any:
            pass

    with pytest.raises(ConfigError, match=r"^callbacks\.mine\.wrap_model\(\): returned None; return the nn\.Module"):
        Hooks({"mine": Forgets()}, 1).wrap("wrap_model", TRAINER, nn.Identity())
