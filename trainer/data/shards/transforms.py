"""Builds and calls the user's sample functions that `data.decoders` and `data.map` name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.config.build import build
from trainer.config.check import STAGES, stage_node
from trainer.config.targets import locate
from trainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.random import Generator


def build_stages(data: Mapping[str, Any], allow: tuple[str, ...]) -> dict[str, list[Callable[..., Any]]]:
    """Build the functions that the section `data` of a config names."""
    return {
        key: [_build(f"data.{key}.{i}", item, arguments, allow) for i, item in enumerate(data.get(key, ()))]
        for key, arguments in STAGES.items()
    }


def _build(key: str, item: Any, arguments: tuple[str, ...], allow: tuple[str, ...]) -> Callable[..., Any]:
    target = stage_node(key, item)["_target_"]
    try:
        function = locate(key, target, allow) if isinstance(item, str) else build(key, item, allow)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}={target}: {error}; correct its arguments") from error
    if isinstance(getattr(function, "func", function), type):
        raise ConfigError(f"{key}={target}: is a class; write {{_target_: {target}}} with its arguments")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        reason = f"can't be called with ({', '.join(arguments)}): {error}"
        raise ConfigError(f"{key}={target}: {reason}; correct it") from None
    except ValueError:  # a function in C has no signature
        pass
    return function


class Dropped(DataError):
    """A map returned None. The map is at fault, so no sample counts as bad."""


class Maps:
    """A transform that applies the functions of `data.map` in order, and then the recipe's `transform`."""

    def __init__(
        self, maps: Sequence[Callable[[Any], Any]], transform: "Callable[[Any, Generator], Any] | None"
    ) -> None:
        self.maps, self.transform = maps, transform

    def __call__(self, sample: Any, rng: "Generator") -> Any:
        key = sample.get("__key__") if isinstance(sample, Mapping) else None
        for number, apply in enumerate(self.maps):
            sample = apply(sample)
            if sample is None:
                raise Dropped(
                    f"data.map.{number}: returned None for sample {key!r}, and a planned order can't drop a sample; "
                    "leave it out of the shards, or raise trainer.errors.DataError, which data.max_bad counts"
                )
        return sample if self.transform is None else self.transform(sample, rng)


def maker_of(transform: Any) -> str:
    """Return the name of the function or data set that makes the samples, for a message."""
    own = transform.transform if isinstance(transform, Maps) else transform
    return f"recipe.{getattr(own, '__name__', 'transform')}()" if own else "the data set"
