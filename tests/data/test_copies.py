"""A data set that user code changes during a run: as in a bare loop, or refused where data workers have copies."""

import math
from typing import Any

import pytest
import torch
from support.messages import refuses
from torch.utils.data import Subset
from toy_recipe import Points, Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, Options
from trainer.data.copies import Copies
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Levels(Points):
    level, seen = 0, ()

    def __init__(self, size: int) -> None:
        super().__init__(size, torch.float32)
        self.level, self.rate = 0, math.nan

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = super().__getitem__(i)
        return {**sample, "x": sample["x"] + self.level}


class Recipe(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.levels, self.seen = Levels(24), list[float]()

    def data(self, split: str) -> Any:
        return Subset(self.levels, range(24)) if split == "train" else None

    def loss(self, model: Any, batch: Any) -> Any:
        self.seen.append(float(batch["x"].min()))
        return super().loss(model, batch)


class Raises(Callback):
    def on_step_end(self, trainer) -> None:
        if trainer.step == 2:
            trainer.recipe.levels.level = 5


def run(workers: int) -> Recipe:
    recipe = Recipe()
    options = Options(max_steps=6, run_dir=f"runs/{workers}", log_every_steps=50)
    Trainer(
        recipe, {"raises": Raises()}, batch=12, options=options, data=DataOptions(workers=workers), place=Place()
    ).fit()
    return recipe


def test_a_change_reaches_the_samples_in_this_process_and_is_refused_where_workers_have_copies(tmp_path):
    seen = run(workers=0).seen
    assert max(seen[:2]) < 5 <= min(seen[-3:])
    why = r"^Levels\.level: was changed from 0 to 5 during the run, and data workers have copies .* data\.workers=0$"
    with pytest.raises(ConfigError, match=why):
        run(workers=1)


def test_a_hook_before_the_first_step_is_refused_and_named_at_a_resume(tmp_path, caplog):
    copies = Copies(levels := Levels(3))
    copies.refuse_before(0)
    levels.level = 1
    with refuses("Levels.level", "0", "1", "recipe.data()"):
        copies.refuse_before(0)
    copies.refuse_before(3)
    assert "resume: Levels.level: was changed from 0 to 1 by a hook" in caplog.text


def test_what_is_no_number_or_text_is_not_compared():
    assert not Copies([1, 2]).kept
    own = Copies(levels := Levels(3))
    levels.rate = math.nan
    del levels.level
    assert own.unchanged(3) == 3
