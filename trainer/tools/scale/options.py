"""Parses the words of the command that are not settings of a run. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from trainer.annotated import AtMost, NonNegativeFloat, NonNegativeInt, PositiveFloat, check_fields
from trainer.errors import ConfigError, nearest

VIEW = {"trainer.ddp.gradient_as_bucket_view": True}  # the default on CUDA
MOST_NODES = 1 << 17


@dataclass(frozen=True)
class Way:
    """Callbacks with their knobs, and settings. `allow` is the run's `trainer.allow_targets`."""

    callbacks: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    allow: tuple[str, ...] = ()


def load() -> dict[str, Way]:
    found: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("ways.yaml")))
    return {name: Way(each.get("callbacks", {}), {**VIEW, **each.get("settings", {})}) for name, each in found.items()}


WAYS = load()


@dataclass(frozen=True)
class ScaleOptions:
    """The keys of a prediction. Every field is a word KEY=VALUE of the command."""

    nodes: tuple[int, ...] = (1, 8, 64, 512, 4096)
    machine: str = "8xh100-8x400g"
    ways: tuple[str, ...] = tuple(WAYS)
    scaling: Literal["weak", "strong"] = "weak"  # strong: the run's batch on any number of nodes
    per_rank: NonNegativeInt = 0  # samples of a rank in a step, for weak; 0: the run's micro_batch, or its batch
    mfu: Annotated[PositiveFloat, AtMost(1)] = 0.4
    tflops: NonNegativeFloat = 0.0  # peak of a device; 0: the machine's, by the precision
    flops: NonNegativeFloat = 0.0  # of a sample, forward and backward; 0: the recipe's
    activation_mib: NonNegativeFloat = 0.0  # that autograd keeps of a sample; 0: left out of the memory
    jitter: NonNegativeFloat = 0.0  # standard deviation of a rank's passes, of their mean

    def __post_init__(self) -> None:
        check_fields(self, "")


def read(words: Sequence[str]) -> tuple[ScaleOptions, list[str]]:
    """Return the options, and the words that are settings of the run."""
    kinds = {field.name: type(field.default) for field in fields(ScaleOptions)}
    given, rest = {}, []
    for word in words:
        key, equals, text = word.partition("=")
        if key not in kinds or not equals:
            rest.append(word)
        elif key == "nodes":
            given[key] = counts(text)
        elif key == "ways":
            given[key] = names(text)
        else:
            given[key] = value(key, text, kinds[key])
    return ScaleOptions(**given), rest


def value(key: str, text: str, kind: type) -> object:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{key}={text}: is not {what}; give one, as in {key}=1") from None


def counts(text: str) -> tuple[int, ...]:
    """Return the numbers of nodes of `4`, `1,2,8` or `1..4096`, which doubles."""
    first, dots, last = text.partition("..")
    parts = [first, last] if dots else text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= MOST_NODES for part in parts) or (dots and int(first) > int(last)):
        raise ConfigError(f"nodes={text}: is no list of numbers from 1 to {MOST_NODES}; give 4, 1,2,8 or 1..4096")
    found = [int(part) for part in parts]
    if dots:
        found = [found[0]]
        while found[-1] * 2 <= int(last):
            found.append(found[-1] * 2)
        found += [int(last)] if found[-1] < int(last) else []
    return tuple(dict.fromkeys(found))


def names(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, text.split(",")))
    for name in found:
        if name not in WAYS:
            raise ConfigError(f"ways={text}: {name} is unknown; {nearest(name, WAYS)}")
    if not found:
        raise ConfigError(f"ways={text}: names none; give some of {','.join(WAYS)}")
    return found
