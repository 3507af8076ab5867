"""One check for the command and for Python: each setting with a wrong value gets the same line from both."""

import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from support.cli import ROOT
from toy_recipe import Toy

from echelon import Callback, DataOptions, Options, Trainer, launch
from recipes.huggingface import HuggingFace
from recipes.lightning import Lightning
from trainer.annotated import Above, AtLeast, AtMost, Below, Bound, PositiveInt, checked, fits
from trainer.callbacks.ema import EMA
from trainer.comm.nccl import NCCLOptions
from trainer.config.check import check_values
from trainer.config.options import CheckpointOptions, DDPOptions, LimitOptions
from trainer.config.schema import ANY_NAME, NO_DEFAULT, Knob, knobs, option_parameters
from trainer.config.targets import LIBRARIES
from trainer.errors import ConfigError
from trainer.optim.schedule import Cosine
from trainer.process.environment import Place

SECTIONS = {
    "trainer": Options,
    "trainer.checkpoint": CheckpointOptions,
    "trainer.ddp": DDPOptions,
    "trainer.limit_batches": LimitOptions,
    "data": DataOptions,
    "nccl": NCCLOptions,
}
OF_RECIPE = ("of_recipe", "OfRecipe")  # stand for the recipe's own
Target = tuple[str, Callable[..., Any], dict[str, Knob]]


def targets() -> Iterator[Target]:
    """Give each section, recipe, optimizer, schedule and callback that conf/ names: key, constructor, knobs."""
    recipes = set[str]()
    for key, options in SECTIONS.items():
        yield key, options, option_parameters(options)
    for group in ("recipe", "optimizer", "schedule", "callbacks"):
        for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
            node: Any = OmegaConf.to_container(OmegaConf.load(path))
            if group == "recipe":  # several files have one recipe
                node = node.get("recipe") or {}
                if node.get("_target_", "") in recipes | {""}:
                    continue
                recipes.add(node["_target_"])
            key, node = (f"callbacks.{path.stem}", node[path.stem]) if group == "callbacks" else (group, node)
            module, _, name = node["_target_"].rpartition(".")
            if name not in OF_RECIPE:
                yield key, getattr(importlib.import_module(module), name), knobs(key, node["_target_"], LIBRARIES)


ALL = [pytest.param(*target, id=f"{target[0]}-{target[1].__name__}") for target in targets()]


OUTSIDE = {AtLeast: -1, AtMost: 1, Above: 0, Below: 0}  # added to a bound


def wrong(kind: Any) -> Iterator[Any]:
    """Give values that an annotation refuses: by its type, by its choices, and by its ranges."""
    yield "a text" if fits({}, kind) else {"of": "another type"}
    for part in typing.get_args(kind) if typing.get_origin(kind) is types.UnionType else (kind,):
        if typing.get_origin(part) is Annotated:
            ranges = [bound for bound in part.__metadata__ if isinstance(bound, Bound)]
            yield from (bound.number + OUTSIDE[type(bound)] for bound in ranges)
            yield from [math.nan] * (typing.get_args(part)[0] is float)
    if "Literal" in str(kind) and not fits("bf16-mixed", kind):
        yield "bf16-mixed"


def message(call: Callable[..., Any], *args: Any, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **more)
    return str(caught.value)


@pytest.mark.parametrize(("key", "make", "known"), ALL)
def test_python_and_the_command_say_the_same(key, make, known):
    groups = ([torch.nn.Parameter(torch.ones(1))],) if key == "optimizer" else ()
    taken = {name: "a" for name, knob in known.items() if knob.default is NO_DEFAULT and key == "recipe"}
    known = {name: knob.annotation for name, knob in known.items() if name not in ("params", ANY_NAME)}
    objects = [name for name, kind in known.items() if kind is Any]
    assert objects == (["module", "datamodule"] if make is Lightning else [])
    said = message(check_values, key, {"xyzzy": 1}, {name: Knob(kind) for name, kind in known.items()})
    assert message(make, *groups, **taken, xyzzy=1) == said
    for name, kind in known.items():
        for value in () if kind is Any or dataclasses.is_dataclass(kind) else wrong(kind):
            said = message(check_values, key, {name: value}, {name: Knob(kind)})
            assert message(make, *groups, **{**taken, name: value}) == said
            assert said.startswith(f"{key}.{name}=") and ": must be " in said and "\n" not in said


RAW = Toy().model()
PYTHON: list[tuple[Callable[..., Any], str]] = [
    (lambda: Options(precision=odd("bf16-mixed")), "trainer.precision=bf16-mixed: must be auto or fp32 or tf32"),
    (lambda: Options(accelerator=odd("gpu")), "trainer.accelerator=gpu: must be auto or cpu or cuda"),
    (lambda: Options(deterministic=odd("yes")), "trainer.deterministic=yes: must be bool, not str"),
    (lambda: Options(seed=odd("a")), "trainer.seed=a: must be int, not str"),
    (lambda: Options(limit_batches=odd({"train": 1})), "trainer.limit_batches={'train': 1}: must be LimitOptions(...)"),
    (lambda: DataOptions(workers=odd("2")), "data.workers=2: must be int, not str"),
    (lambda: make(batch="32"), "batch=32: must be int, not str"),
    (lambda: make(batch=0), "batch=0: must be at least 1"),
    (lambda: make(micro_batch=1.5), "micro_batch=1.5: must be int or null, not float"),
    (lambda: make(options={"max_steps": 3}), "options={'max_steps': 3}: must be Options(...) or null, not dict"),
    (lambda: make(options=Options), "options=<class 'trainer.config.options.Options'>: must be Options(...)"),
    (lambda: make(data={"workers": 0}), "data={'workers': 0}: must be DataOptions(...) or null, not dict"),
    (lambda: make(optimizer="adamw"), "optimizer=adamw: must be a function, not str"),
    (lambda: make(optimizer=torch.optim.SGD(RAW.parameters())), "optimizer=SGD(...): is one of a model that exists"),
    (lambda: make(schedule="cosine"), "schedule=cosine: is no schedule; give an object, as Cosine() of"),
    (lambda: make(schedule=Cosine), "schedule=<class 'trainer.optim.schedule.Cosine'>: is no schedule; give an object"),
    (lambda: make(recipe=Toy), "recipe: is the class Toy, not an object of it; give Toy()"),
    (lambda: make(recipe="bert_tiny"), "recipe: str has no method 'model'; define model, data and loss"),
    (lambda: make(callbacks=["ema"]), "callbacks=ema: is a name; in Python give an object, as EMA() of"),
    (lambda: make(callbacks=[EMA]), "callbacks: is the class EMA, not an object of it; give EMA()"),
    (lambda: make(callbacks={"ema": EMA}), "callbacks.ema: is the class EMA, not an object of it; give EMA()"),
    (lambda: make(callbacks=EMA()), "callbacks: is a value of type EMA; give a list, as [EMA()]"),
    (lambda: make(place=0), "place=0: must be Place(...) or null, not int"),
    (lambda: Own(every=0), "callbacks.own.every=0: must be at least 1"),
    (lambda: Own(every=odd("often")), "callbacks.own.every=often: must be int, not str"),
    (lambda: Options(**odd({"precison": "bf16"})), "trainer.precison=bf16: no such key; did you mean precision?"),
    (lambda: Options(**odd({"gpus": 2})), "trainer.gpus=2: no such key; here it is trainer.devices=N"),
    (lambda: DataOptions(**odd({"num_workers": 2})), "data.num_workers=2: no such key; here it is data.workers=N"),
    (lambda: Cosine(**odd({"flor": 0.1})), "schedule.flor=0.1: no such key; did you mean floor?"),
    (lambda: make(gpus=2), "gpus=2: no such key; here it is trainer.devices=N"),
    (lambda: make(batches=2), "batches=2: no such key; did you mean batch or micro_batch"),
    (lambda: CheckpointOptions(keep_best=""), "trainer.checkpoint.keep_best=: names no metric; give one, as val/loss"),
    (lambda: make(data=DataOptions(decoders=[3])), "data.decoders.0=3: must be a function, not int"),
    (lambda: make(data=DataOptions(map=["x.y"])), "data.map.0=x.y: must be a function, not str"),
    (lambda: HuggingFace(odd(3), "d"), "recipe.model=3: must be str, not int"),
    (lambda: HuggingFace("m", "d", pretrained=odd("yes")), "recipe.pretrained=yes: must be bool or null, not str"),
    (lambda: HuggingFace("m", "d", warmup_steps=odd("3")), "recipe.warmup_steps=3: must be float, not str"),
    (lambda: launch(print, devices=odd("2")), "launch: devices=2: must be int or auto"),
]  # fmt: skip


def odd(value: Any) -> Any:
    return value


def make(recipe: Any = None, batch: Any = 12, **more: Any) -> Trainer:
    return Trainer(recipe or Toy(), batch=batch, **({"place": Place(), "options": Options(max_steps=1)} | more))


class Own(Callback):
    def __init__(self, every: PositiveInt = 5) -> None:
        self.every = every


@pytest.mark.parametrize(("call", "line"), PYTHON)
def test_a_mistake_in_python_is_one_line(call, line, tmp_path):
    said = message(call)
    assert said.startswith(line) and "\n" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "kind", "taken"),
    [
        (1e3, int, 1000), (1e3, int | None, 1000), (1e3, int | str, 1000), (np.int64(3), int, 3), (True, bool, True),
        (np.float32(0.5), float, 0.5), (torch.tensor(0.5), float, 0.5), (np.array(2), PositiveInt, 2),
        ((0.9, np.float64(0.5)), tuple[float, float], (0.9, 0.5)), (3, float, 3),
        (OmegaConf.create([3, 4]), list[int] | None, [3, 4]), (OmegaConf.create({"a": 1}), dict | None, {"a": 1}),
    ],
)  # fmt: skip
def test_numbers_become_plain(given, kind, taken):
    value = checked("key", given, kind)
    assert value == taken and type(value) is type(taken)


def test_a_whole_number_with_an_exponent_is_an_int():
    assert Options(max_steps=odd(1e3)).max_steps == 1000 and type(Options(max_steps=odd(1e3)).max_steps) is int
    values = {"max_steps": 1e3}
    check_values("trainer", values, option_parameters(Options))
    assert values == {"max_steps": 1000} and type(values["max_steps"]) is int
    assert message(Options, max_steps=1.5) == "trainer.max_steps=1.5: must be int or null, not float"


def test_a_class_with_annotations_that_only_a_type_checker_resolves_is_left_alone():
    namespace: dict[str, Any] = {"Callback": Callback}
    exec("class Later(Callback):\n    def __init__(self, size: 'Nowhere', rest=None): self.size = size", namespace)
    assert namespace["Later"](size=[1]).size == [1]
    assert message(namespace["Later"], sise=1) == "callbacks.later.sise=1: no such key; did you mean size?"
