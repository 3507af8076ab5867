"""The settings of a search, `tune.*`, and their separation from the arguments of the run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from trainer.annotated import AtLeast, PositiveFloat, PositiveInt, check_fields
from trainer.config.check import check_values
from trainer.config.folders import CONF
from trainer.config.schema import option_parameters
from trainer.errors import ConfigError, nearest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class TuneOptions:
    budget_s: PositiveFloat = 600.0  # of the whole search, with the canary
    lossy: bool = False  # also callbacks that change the numbers, by time to loss
    apply: bool = False  # print the command that resumes the running job trainer.run_dir with the result
    without: list[str] = field(default_factory=list)  # callbacks that are never tried
    name: str | None = None  # of the result, conf/tuned/NAME.yaml; null: the recipe's name
    steps: Annotated[int, AtLeast(2)] = 20  # timed steps of a trial
    warm: PositiveInt = 3  # steps before them
    # Pairs of short runs in the canary: today's config, then the winner. By chance, 5 of 5 are won at 3 %.
    pairs: Annotated[int, AtLeast(5)] = 5
    limit_s: PositiveFloat = 300.0  # of one trial; one that takes longer has failed
    bound: PositiveFloat = 0.01  # largest relative difference of a lossy config's loss

    def __post_init__(self) -> None:
        check_fields(self, "tune.")
        known = {path.stem for path in (CONF / "callbacks").glob("*.yaml")}
        for name in sorted({*self.without} - known):
            raise ConfigError(f"tune.without={name}: no such callback; {nearest(name, known)}")
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ConfigError(f"tune.name={self.name}: must be the name of a file: letters, digits, '.', '-' and '_'")


def read_options(arguments: Sequence[str]) -> tuple[TuneOptions, list[str]]:
    """Return the settings of the search, and the arguments of the run."""
    from omegaconf import OmegaConf

    own = [word.lstrip("+") for word in arguments if re.match(r"\+{0,2}tune\.", word)]
    for word in own:
        if "=" not in word:
            raise ConfigError(f"{word}: has no value; give {word}=VALUE")
    try:
        made: Any = OmegaConf.to_container(OmegaConf.from_dotlist(own))
    except Exception as error:  # YAML's own errors have no common base with OmegaConf's
        raise ConfigError(f"tune: {' '.join(str(error).split())[:200]}; give KEY=VALUE") from None
    values = made.get("tune", {})
    check_values("tune", values, option_parameters(TuneOptions))
    return TuneOptions(**values), [word for word in arguments if word.lstrip("+") not in own]
