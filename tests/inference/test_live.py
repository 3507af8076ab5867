"""`Trainer.evaluate` and `Trainer.predict`: before and after a run, on one rank and several, against plain PyTorch."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.callbacks.ema import EMA
from trainer.callbacks.shard.callback import Shard
from trainer.callbacks.swa import SWA
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.inference.live import alternative
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Predicts(Toy):
    def data(self, split: str) -> Any:
        if split == "none":
            return None
        return [torch.ones(1)] if split == "list" else Points({"train": 96, "test": 7}.get(split, 13), self.dtype)

    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        assert not model.training
        return {"y": model(batch["x"]), "first": batch["x"][:, 0].tolist()}


def make(place: Place, callbacks: Any = (), **options: Any) -> Trainer:
    return Trainer(
        Predicts(dtype="float64"), callbacks, batch=12, micro_batch=2, place=place, data=DataOptions(workers=0),
        options=Options(**{"max_steps": 2, "run_dir": "runs/r", **options}),
    )  # fmt: skip


def by_hand(model: nn.Module, size: int) -> tuple[float, list[list[float]]]:
    """The loss and the outputs in plain PyTorch."""
    points = Points(size, torch.float64)
    rows = [points[i] for i in range(size)]
    x, y, mask = (torch.stack([row[name] for row in rows]) for name in ("x", "y", "mask"))
    with torch.no_grad():
        out = model(x)
    return float(((out - y).square() * mask).sum() / mask.sum()), out.tolist()


def before_and_after(place: Place) -> list[Any]:
    """Metrics and predictions of each split, beside those by hand."""
    trainer = make(place)
    found = []
    for _ in range(2):
        for split, size in (("val", 13), ("test", 7)):
            metrics, predictions = trainer.evaluate(split), trainer.predict(split)
            loss, outputs = by_hand(trainer.module, size)
            found.append((metrics, {f"{split}/loss": loss}, predictions["y"].tolist(), outputs))
            assert predictions.index == list(range(size)) and len(predictions) == size
            assert predictions["first"] == [float(Points(size, torch.float64)[i]["x"][0]) for i in range(size)]
        if not trainer.fitted:
            trainer.fit()
    assert trainer.module.training
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_metrics_and_predictions_are_those_of_plain_pytorch(world):
    for rank in run_ranks(world, before_and_after):
        for metrics, expected, outputs, by_hand in rank:
            assert metrics == pytest.approx(expected, rel=1e-12)
            assert torch.allclose(torch.tensor(outputs), torch.tensor(by_hand), rtol=1e-12)


def test_a_resumed_trainer_reads_with_the_weights_of_its_checkpoint():
    summary = make(Place()).fit()
    again = make(Place(), resume="ckpt/r", max_steps=4)
    assert again.evaluate()["val/loss"] == pytest.approx(summary["val/loss"], rel=1e-12)
    assert again.fit()["steps"] == 4
    started = make(Place(), init_from=summary["checkpoint"], run_dir="runs/s")
    assert started.evaluate()["val/loss"] == pytest.approx(summary["val/loss"], rel=1e-12)
    assert started.fit()["steps"] == 2


def test_after_a_run_with_an_average_the_average_reads():
    trainer = make(Place(), [EMA(decay=0.5)])
    summary = trainer.fit()
    assert trainer.evaluate()["val/loss"] == pytest.approx(summary["val/loss"], rel=1e-12)
    outputs, average, last = (
        torch.tensor(rows, dtype=torch.float64)
        for rows in (
            trainer.predict()["y"].tolist(),
            by_hand(trainer.eval_model, 13)[1],
            by_hand(trainer.module, 13)[1],
        )
    )
    assert torch.allclose(outputs, average, rtol=1e-12) and not torch.allclose(outputs, last, rtol=1e-6)


def refused(what: Any) -> str:
    with pytest.raises(ConfigError) as error:
        what()
    return str(error.value)


def sharded(place: Place) -> list[Any]:
    trainer = make(place, [Shard(stage=3)])
    before, errors = trainer.evaluate(), [refused(trainer.predict)]
    summary = trainer.fit()
    errors += [refused(trainer.evaluate), refused(trainer.predict)]
    whole = make(place, resume="ckpt/r")
    found = [before, whole.evaluate(), summary, len(whole.predict())]
    whole.close()
    return [*found, errors]


def test_a_model_in_parts_is_evaluated_before_its_run_alone():
    """The errors name another Trainer, which reads the checkpoint."""
    expected = by_hand(make(Place(), run_dir="runs/plain").module, 13)[0]
    part = "each rank has a part of the model; make another Trainer without shard"
    resumed = f"{part}, with Options(resume='ckpt/r')"
    for before, after, summary, predictions, errors in run_ranks(2, sharded):
        assert before == pytest.approx({"val/loss": expected}, rel=1e-5) and predictions == 13
        assert after == pytest.approx({"val/loss": summary["val/loss"]}, rel=1e-5)
        assert errors == [f"predict: {part}", f"evaluate: {resumed}", f"predict: {resumed}"]


def test_a_run_that_goes_on_is_not_read():
    trainer = make(Place())
    trainer.loop.context.world, trainer.loop.context.fitted = 2, True  # as a callback on one of two ranks
    why = "evaluate: the run is still training, or has failed; call it after fit, or make another Trainer"
    assert refused(trainer.evaluate) == why


def test_the_command_is_named_for_a_run_that_has_a_config():
    trainer = make(Place())
    trainer.fit()
    assert alternative(trainer, "predict") == "make another Trainer, with Options(resume='ckpt/r')"
    (trainer.run_dir / "config.yaml").touch()
    assert alternative(trainer, "predict") == "use echelon predict runs/r"


def test_what_has_no_order_or_no_data_is_refused():
    trainer = make(Place())
    with refuses("predict", "recipe.data"):
        trainer.predict("list")
    with refuses("recipe.data('none')", "None", "split"):
        trainer.evaluate("none")
    trainer.recipe = Toy()
    with refuses("recipe", "'predict'"):
        trainer.predict()


class FailsOnOne(Predicts):
    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if torch.distributed.get_rank():
            raise RuntimeError("trouble")
        return super().predict(model, batch)


def failing(place: Place) -> str:
    trainer = make(replace(place))
    trainer.recipe = FailsOnOne(dtype="float64")
    with pytest.raises(RuntimeError) as error:
        trainer.predict()
    trainer.close()
    return str(error.value)


def test_ranks_beside_a_failed_one_say_so():
    assert run_ranks(2, failing) == ["rank 1 failed in predict", "trouble"]


def ended_twice(place: Place) -> list[float]:
    found = []
    for name, average in (("ema", EMA(0.5)), ("swa", SWA(start=1, every=1))):
        for number in range(2):
            again = replace(place, store=f"{place.store}-{name}-{number}")
            trainer = make(again, {name: deepcopy(average)}, run_dir=f"runs/{name}", resume="auto")
            trainer.fit()
            found.append(trainer.evaluate()["val/loss"])
        found.append(by_hand(trainer.module, 13)[0])
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_a_run_that_has_ended_has_the_average_again(world: int):
    for ema, ended, plain, swa, ended_swa, plain_swa in run_ranks(world, ended_twice):
        assert ema == ended != plain and swa == ended_swa != plain_swa
