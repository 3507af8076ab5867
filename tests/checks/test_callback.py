"""Mistakes in a callback of one's own: one line that names the callback and the hook."""

from typing import Any

import numpy as np
import pytest
import torch
from support.messages import refuses
from toy_recipe import Toy

from echelon import Callback, ConfigError, DataOptions, Options, Role, Trainer
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")

STEPS = 4


def train(methods: dict[str, Any], role: Role = Role.MEASURE, log_every_steps: int = 1) -> Trainer:
    trainer = None
    options = Options(max_steps=STEPS, log_every_steps=log_every_steps)
    callback = type("Mine", (Callback,), {"role": role, **methods})()
    trainer = Trainer(Toy(), [callback], batch=12, options=options, data=DataOptions(0), place=Place())
    trainer.fit()
    return trainer


def step_end(**values: Any) -> dict[str, Any]:
    return {"on_step_end": lambda self, trainer: trainer.metrics.update(values)}


def setting(name: str, at: int = 2) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(f"def on_step_end(self, trainer):\n    if trainer.step == {at}: trainer.{name} = True", scope)
    return {"on_step_end": scope["on_step_end"]}


@pytest.mark.parametrize(
    ("role", "methods", "line"),
    [
        (Role.MEASURE, {"on_step_end": lambda self, trainer, module: None},
         "on_step_end(trainer, module): is called with (trainer); give it these parameters"),
        (Role.MEASURE, {"on_fit_start": lambda self: None}, "on_fit_start(): is called with (trainer)"),
        (Role.MEASURE, {"state_dict": lambda self, trainer: {}}, "state_dict(trainer): is called with ()"),
        (Role.MODEL, {"wrap_model": lambda self, trainer, model: None},
         "wrap_model(): returned None; return the nn.Module, wrapped or not"),
        (Role.MODEL, {"build_model": lambda self, trainer, build: build}, "build_model(): returned a value"),
        (Role.MODEL, {"wrap_model": lambda self, trainer, model: torch.nn.Linear},
         "wrap_model(): returned the class Linear, not an object of it"),
        (Role.OPTIMIZER, {"wrap_optimizer": lambda self, trainer, optimizer: None}, "wrap_optimizer(): ret"),
        (Role.OPTIMIZER, {"wrap_optimizer": lambda self, trainer, optimizer: optimizer.step},
         "wrap_optimizer(): returned a value of type method; return the object that it was given"),
        (Role.MODEL, {"wrap_forward_backward": lambda self, trainer, run: None},
         "wrap_forward_backward(): returned None; return the object that it was given, wrapped or not"),
        (Role.MODEL, {"wrap_batches": lambda self, trainer, steps: None}, "wrap_batches(): returned None"),
        (Role.BATCH, {"split": lambda self, trainer, position: None}, "split(): returned None; return a Sp"),
        (Role.SHARD, {"distribute": lambda self, trainer, model: None}, "distribute(): returned None; ret"),
        (Role.MEASURE, step_end(text="hello"), "on_step_end(): trainer.metrics['text'] is a value of type"),
        (Role.MEASURE, step_end(v=torch.ones(3)), "on_step_end(): trainer.metrics['v'] is a tensor of shape"),
        (Role.OBSERVE, step_end(none=None), "on_step_end(): trainer.metrics['none'] is None; give a number"),
        (Role.MEASURE, {"state_dict": lambda self: {"f": lambda: 1}},
         "state_dict(): 'f' can't be saved (state f: a function can't"),
        (Role.MEASURE, {"state_dict": lambda self: {"f": {"g": [object()]}}},
         "state_dict(): 'f' can't be saved (state f/g/0: a object can't"),
        (Role.MEASURE, {"state_dict": lambda self: None}, "state_dict(): returned None; return a dict of"),
        (Role.MEASURE, {"decisions": lambda self: {"f": {1, 2}}}, "decisions(): 'f' can't be saved (Object of"),
        (Role.MEASURE, {"rank_state_dict": lambda self: [1]}, "rank_state_dict(): returned a value of type"),
        (Role.OBSERVE, setting("should_stop"),
         "on_step_end(): trainer.should_stop was set, and the trainer has no such attribute; call "
         "trainer.stop('reason'), on all ranks"),
        (Role.OBSERVE, setting("metric"), "on_step_end(): trainer.metric was set, and the trainer has no"),
    ],
)  # fmt: skip
def test_one_line_names_the_callback_and_the_hook(role, methods, line):
    with pytest.raises(ConfigError) as caught:
        train(methods, role)
    assert str(caught.value).startswith(f"callbacks.mine.{line}") and "\n" not in str(caught.value)


def test_an_unknown_attribute_is_refused_at_its_own_step_also_without_numbers():
    steps: list[int] = []
    methods = setting("should_stop", at=2)
    methods["on_before_optimizer_step"] = lambda self, trainer: steps.append(trainer.step)
    with refuses("callbacks.mine.on_step_end()", "trainer.should_stop", "trainer.stop('reason')"):
        train(methods, Role.OBSERVE, log_every_steps=50)
    assert steps == [0, 1]


def test_numbers_of_other_libraries_are_taken():
    numbers = {"a": np.float64(1.5), "b": torch.tensor(2.0), "c": np.array(3), "d": torch.ones(1), "e": True, "f": 1}
    metrics = train(step_end(**numbers)).last_metrics
    assert {name: metrics[name] for name in numbers} == {"a": 1.5, "b": 2.0, "c": 3, "d": 1.0, "e": 1, "f": 1}
    assert {type(metrics[name]) for name in numbers} == {int, float}


def test_what_the_trainer_has_may_be_set():
    def wrap(self, trainer, model):
        trainer.eval_model = trainer.global_model = model
        return model

    def end(self, trainer):
        trainer.lag, trainer.metrics["x"] = 0, 1.0

    assert train({"wrap_model": wrap, "on_step_end": end}, Role.MODEL).step == STEPS
