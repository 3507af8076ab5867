"""What a notebook shows of a Trainer, of its summary and of predictions: tables."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from yaml.representer import Representer, SafeRepresenter

from trainer.context import Context
from trainer.process.notebook import table
from trainer.summary import best_in_words, readable

WIDEST = 80  # characters of a prediction
SHOWN = 8  # numbers of a prediction


class Summary(dict[str, Any]):
    """The content of summary.json, which a notebook shows as a table. Pickled and dumped it is a plain dict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def _repr_html_(self) -> str:
        return table((name, in_words(value)) for name, value in self.items() if name != "versions")


for representer in (Representer, SafeRepresenter):  # of all dumpers, those in C too
    representer.add_representer(Summary, SafeRepresenter.represent_dict)


def in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {in_words(each)}" for name, each in value.items())
    return readable(value) if isinstance(value, float) else "" if value is None else str(value)


def facts(trainer: Context) -> list[tuple[str, str]]:
    """Return the rows of a Trainer's table: what is trained, how, and how far."""
    plan, module = trainer.plan, trainer.module
    parameters = sum(p.numel() for p in module.parameters())
    steps = f"{trainer.step:,}" + (f" of {plan.max_steps:,}" if plan.max_steps is not None else "")
    shares = trainer.strategy.data_world * plan.accumulate
    micro = f"{'at most ' if trainer.batch % shares else ''}{plan.micro}"
    split = f"{trainer.strategy.data_world} x {plan.accumulate} x {micro}"
    found = [
        ("recipe", type(trainer.recipe).__name__),
        ("model", f"{type(module).__name__}, {parameters:,} parameters"),
        ("ranks", f"{trainer.world} on {trainer.device.type}, {trainer.precision.label}"),
        ("batch", f"{trainer.batch} = {split} (replicas x accumulation x micro-batch)"),
        ("optimizer", type(trainer.optimizer).__name__),
        ("callbacks", ", ".join(trainer.callbacks) or "none"),
        ("step", steps),
        ("best", best_in_words(trainer.best, trainer.checkpoint) if trainer.best else ""),
        ("checkpoint", str(trainer.checkpoint or "")),
        ("folder", str(trainer.run_dir)),
    ]
    return [(name, text) for name, text in found if text]


def short(value: Any) -> str:
    """Return a sample's prediction in a few characters."""
    if isinstance(value, Tensor):
        numbers = map(in_words, value.flatten()[:SHOWN].tolist())
        text = ", ".join([*numbers, "..."] if value.numel() > SHOWN else numbers)
    else:
        text = in_words(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
