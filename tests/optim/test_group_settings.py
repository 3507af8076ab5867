"""Settings of groups that user code changes during a run hold after a resume, as in a run that was not interrupted."""

from functools import partial
from typing import Any

import pytest
import torch
from support.runs import make
from torch import nn

from trainer.callback import Callback
from trainer.checkpoint.manifest import Damaged
from trainer.errors import ConfigError
from trainer.optim.group_settings import GroupSettings


class Changes(Callback):
    """Changes settings after step 2."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def on_step_end(self, trainer) -> None:
        if trainer.step == 2:
            trainer.optimizer.param_groups[0].update(self.settings)


def weights(optimizer: Any, settings: dict[str, Any], ends: tuple[int, ...]) -> list[torch.Tensor]:
    for steps in ends:
        trainer = make(callbacks={"changes": Changes(**settings)}, optimizer=optimizer, max_steps=steps, resume="auto")
        trainer.fit()
    return [p.detach().clone() for p in trainer.module.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.5), {"momentum": 0.9, "weight_decay": 0.1}),
        (lambda groups: torch.optim.AdamW(groups, lr=0.05), {"betas": (0.5, 0.6)}),
    ],
)
def test_a_changed_setting_holds_after_a_resume(optimizer, settings, tmp_path, monkeypatch):
    found = []
    for ends in ((6,), (4, 6)):
        (tmp_path / str(ends)).mkdir()
        monkeypatch.chdir(tmp_path / str(ends))
        found.append(weights(optimizer, settings, ends))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_strangers_settings_are_refused():
    own = GroupSettings(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert own.state_dict() == []
    for odd in ({"params": 3}, {"lr": 1.0}, {"momentum": "x"}, {"other": 1.0}):
        with pytest.raises(ValueError, match="has no setting"):
            own.load_state_dict([odd])
    with pytest.raises(ValueError, match="zip"):
        own.load_state_dict([])


class Breaks(Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, trainer) -> None:
        if trainer.step == 2 and self.how == "layer":
            trainer.module.last = nn.Linear(16, 4)
        if trainer.step == 2 and self.how == "params":
            trainer.optimizer.param_groups[0]["params"] = []
        if trainer.step == 3 and self.how == "group":
            del trainer.optimizer.param_groups[0]
        if trainer.step == 2 and self.how == "added":
            trainer.optimizer.add_param_group({"params": []})


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("layer", r"^optimizer: trains 2 parameters that the model has no more, "),
        ("params", r"^optimizer: keeps state of parameters that it trains no more; "),
        ("group", r"^optimizer: a group was added or removed before step 4, "),
        ("added", r"^optimizer: a group was added or removed before this checkpoint, "),
    ],
)
def test_other_parameters_during_a_run_are_refused(how, why, tmp_path):
    with pytest.raises(ConfigError, match=why) as caught:
        make(callbacks={"breaks": Breaks(how)}, max_steps=6).fit()
    assert not isinstance(caught.value, Damaged)


def test_another_optimizer_that_a_resume_accepts_has_its_own_settings(tmp_path):
    make(callbacks={"changes": Changes(momentum=0.9, weight_decay=0.5)}, max_steps=4).fit()
    adam = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.25)
    again = make(optimizer=adam, max_steps=6, resume="auto", accept=["optimizer"])
    again.fit()
    assert again.step == 6 and again.optimizer.param_groups[0]["weight_decay"] == 0.25
