"""What a recipe gives at the end of a validation: on each rank once, watched by name, and without repeated batches."""

import time
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.callbacks.early_stop import EarlyStop
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")

SIZES = {"short": 5, "long": 13}


class Ends(Toy):
    """Keeps what it has seen, in a list and in a number, until the end."""

    several = False

    def __init__(self, **knobs: Any) -> None:
        super().__init__(dtype="float64", **knobs)
        self.seen: list[Tensor] = []
        self.samples, self.ends = 0, 0

    def data(self, split: str) -> Any:
        if split == "train":
            return Points(96, self.dtype)
        return (
            {name: Points(size, self.dtype) for name, size in SIZES.items()} if self.several else Points(13, self.dtype)
        )

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        model(batch["x"])
        self.seen.append(batch["x"][:, 0])
        self.samples += len(batch["x"])
        return {"first": (batch["x"][:, 0].sum(), len(batch["x"]))}

    def validation_end(self, model: nn.Module) -> dict[str, Any]:
        self.ends += 1
        seen, samples = self.seen, self.samples
        self.seen, self.samples = [], 0
        return {"batches": (torch.tensor(float(len(seen))), 1), "samples": (torch.tensor(float(samples)), 1)}


class SeveralEnds(Ends):
    several = True


class Fails(Ends):
    """Rank 1 fails at the end of the last validation, while the others would communicate."""

    trains = False

    def validation_end(self, model: nn.Module) -> dict[str, Any]:
        if self.trains and torch.distributed.get_rank() == 1:
            raise OSError("no more memory on this GPU")
        return super().validation_end(model)


class FailsBefore(Fails):
    """Rank 1 fails in a batch, and the end of a validation communicates."""

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        if self.trains and torch.distributed.get_rank() == 1:
            raise OSError("no more memory on this GPU")
        return super().metrics(model, batch)

    def validation_end(self, model: nn.Module) -> dict[str, Any]:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return Ends.validation_end(self, model)


def made(place: Place, recipe: Toy, callbacks: Any = None, **options: Any) -> Trainer:
    return Trainer(
        recipe, callbacks or [], batch=12, micro_batch=2, data=DataOptions(workers=0), place=place,
        options=Options(**{"max_steps": 2, "run_dir": "runs/r", "timeout_s": 60.0, **options}),
    )  # fmt: skip


def counted(place: Place, kind: type[Ends], layout: str) -> tuple[dict[str, float], int]:
    layouts = {"": [], "shard": [Shard(stage=3)], "pipeline": [PipelineParallel(stages=2, schedule="gpipe", cut=[1])]}
    trainer = made(place, kind(), layouts[layout])
    trainer.fit()
    return trainer.validation, trainer.recipe.ends


@pytest.mark.parametrize("world, layout", [(1, ""), (2, ""), (3, ""), (3, "shard"), (2, "pipeline")])
@pytest.mark.parametrize("kind", quick([Ends, SeveralEnds]))
def test_the_end_sees_each_sample_once_on_any_number_of_ranks(world, layout, kind):
    """In lockstep a rank repeats its last batch, and the end does not see it twice."""
    sets = {f"val/{name}": size for name, size in SIZES.items()} if kind.several else {"val": 13}
    for found, ends in run_ranks(world, counted, kind, layout):
        assert ends == 2 * len(sets)  # the trial before step 1, and the validation
        for prefix, size in sets.items():
            assert found[f"{prefix}/samples"] * world == pytest.approx(size, rel=1e-12)
            assert found[f"{prefix}/first"] == pytest.approx(mean(size), rel=1e-6)


def mean(size: int) -> float:
    points = Points(size, torch.float64)
    return sum(float(points[i]["x"][0]) for i in range(size)) / size


@pytest.mark.parametrize("key", ["keep_best", "early_stop"])
def test_a_metric_of_the_end_is_watched_and_another_is_refused_before_step_1(key):
    for name, known in (("val/samples", True), ("val/sample", False)):
        best = f"max {name}" if key == "keep_best" else None
        stops = [EarlyStop(name)] if key == "early_stop" else []
        options = {"checkpoint": CheckpointOptions(keep_best=best), "run_dir": f"runs/{known}", "validate_every": 1}
        if known:
            made(Place(), Ends(), stops, **options).fit()
        else:
            with pytest.raises(ConfigError, match=f"={name}: validation gives no such metric; .*val/samples"):
                made(Place(), Ends(), stops, **options)


@pytest.mark.parametrize("value", [{"f1": 0.5}, {"f1": ("0.5", 1)}, None])
def test_a_value_that_is_no_sum_and_count_is_refused_by_the_methods_name(value, monkeypatch):
    monkeypatch.setattr(Ends, "validation_end", lambda recipe, model: value)
    with refuses("recipe.validation_end()", "(sum, count)"):
        made(Place(), Ends())


def failed(place: Place, kind: type[Fails]) -> tuple[str, float]:
    trainer = made(place, kind())
    trainer.recipe.trains, began = True, time.monotonic()
    with pytest.raises(Exception) as caught:
        trainer.fit()
    trainer.close()
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began


@pytest.mark.parametrize("kind", [Fails, FailsBefore])
def test_a_rank_that_fails_at_the_end_is_named_and_no_other_hangs(kind):
    told, seconds = zip(*run_ranks(3, failed, kind), strict=True)
    others = "DistError: rank 1 failed in validation"
    assert told == (others, "OSError: no more memory on this GPU", others)
    assert max(seconds) < 50  # the limit of a collective is 60 s
