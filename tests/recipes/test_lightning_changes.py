"""What a module changes during the run: its weights are those of Lightning's Trainer, or the run is refused by name."""

from typing import Any

import pytest
import torch
from support.lightning import by_echelon, by_lightning, make_echelon, same_weights
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks

from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.config.options import CheckpointOptions
from trainer.errors import ConfigError
from trainer.process.environment import Place

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("tmp_path")]


def unfreeze(module: Any, epoch: int) -> None:
    module.encoder.requires_grad_(epoch == 1)


def freeze(module: Any, epoch: int) -> None:
    module.decoder[2].requires_grad_(epoch != 1)
    module.encoder.requires_grad_(epoch != 1)


def rate(module: Any, epoch: int) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.5


def state(module: Any, epoch: int) -> None:
    if epoch == 1:
        module.optimizers().state.clear()


def group(module: Any, epoch: int) -> None:
    if epoch == 1:
        module.optimizers().add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def unchanged(module: Any, epoch: int) -> None:
    """Change nothing."""


CHANGES = {"unfreeze": unfreeze, "freeze": freeze, "rate": rate, "state": state}


def module_that(change: Any, name: str = "Changes") -> Any:
    import lightning_modules

    kind = getattr(lightning_modules, name)
    kind.changes = staticmethod(change)
    return kind


def numbers() -> Any:
    import lightning_modules

    return lightning_modules.Numbers()


@pytest.mark.parametrize("name", CHANGES)
def test_weights_are_those_of_lightning_also_after_a_resume(name):
    module = module_that(CHANGES[name])
    theirs = by_lightning(module, numbers(), max_epochs=3)
    often: dict[str, Any] = {"max_epochs": 3, "checkpoint": CheckpointOptions(every_steps=20)}  # in epoch 1 of 12 steps
    straight = by_echelon(module, numbers(), **often)
    assert same_weights(straight.module, theirs.lightning_module)
    resumed = by_echelon(module, numbers(), **often, run_dir="runs/s", resume="ckpt/r/step-00000020")
    assert name == "state" or same_weights(resumed.module, straight.module)


def test_a_change_inside_a_step_is_lightnings_on_one_rank():
    module = module_that(unchanged, "Inside")
    theirs = by_lightning(module, numbers(), max_epochs=1)
    assert same_weights(by_echelon(module, numbers(), max_epochs=1).module, theirs.lightning_module)


def test_a_change_inside_a_step_of_ranks_is_refused():
    said = run_ranks(2, refused, "Inside")[0]
    assert said.startswith("encoder.0.weight: was unfrozen during the run, inside a pass of step 3, and 2 ranks have")


def of_ranks(place: Place, name: str, resume: str) -> Any:
    often: dict[str, Any] = {"checkpoint": CheckpointOptions(every_steps=9), "max_epochs": 3, "batch": 8}
    run: dict[str, Any] = {"run_dir": "runs/s", "resume": resume} if resume else {}
    trainer = make_echelon(module_that(CHANGES[name]), numbers(), place=place, **often, **run)
    trainer.fit()
    return trainer.module.state_dict()


@pytest.mark.parametrize("name", ["unfreeze", "freeze"])
def test_ranks_lay_out_what_trains_again(name):
    """Each has the weights of the other, and of a resume."""
    first, second = run_ranks(2, of_ranks, name, "")
    again, _ = run_ranks(2, of_ranks, name, "ckpt/r/step-00000009")
    assert all(torch.equal(value, second[key]) and torch.equal(value, again[key]) for key, value in first.items())
    begun = make_echelon(module_that(CHANGES[name]), numbers(), run_dir="runs/b", max_steps=1).module.state_dict()
    assert not any(torch.equal(value, begun[key]) for key, value in first.items())


def refused(place: Place, name: str) -> str:
    try:
        make_echelon(module_that(unchanged, name), numbers(), 4 * place.world, place=place, max_epochs=3).fit()
    except Exception as error:
        return str(error)
    return ""


def test_a_group_that_a_resume_would_lack_is_refused():
    with refuses("optimizer", "group", "13"):
        by_echelon(module_that(group), numbers(), max_epochs=3)


def test_a_state_of_the_data_is_in_checkpoints():
    """As Lightning has it: what `state_dict` returned at the checkpoint."""
    kind = type("Kept", (type(numbers()),), {"loaded": None})
    kind.state_dict = lambda self: {"seen": 3}
    kind.load_state_dict = lambda self, state: setattr(type(self), "loaded", state)
    often: dict[str, Any] = {"checkpoint": CheckpointOptions(every_steps=4), "max_steps": 6}
    by_echelon(module_that(unchanged), kind(), **often)
    assert kind.loaded is None
    by_echelon(module_that(unchanged), kind(), **often, run_dir="runs/s", resume="ckpt/r/step-00000004")
    assert kind.loaded == {"seen": 3}


def test_a_rate_that_a_scheduler_sets_is_refused():
    module = module_that(rate, "Scheduled")
    with refuses("optimizer.param_groups[0]['lr']=0.005", "schedule=constant"):
        by_echelon(module, numbers(), max_epochs=3)


def test_a_callback_that_has_laid_out_what_trains_is_named():
    words = r"^encoder\.0\.weight: was unfrozen during the run, at step 13, and callbacks\.fused has laid out"
    with pytest.raises(ConfigError, match=words):
        by_echelon(module_that(unfreeze), numbers(), callbacks={"fused": OptimizerInBackward()}, max_epochs=3)
