"""Several losses by name: means over the items of all ranks and micro-batches, and what is no such dict."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.metrics.named_losses import NamedLosses
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Parts(Toy):
    """Without `metrics`, so a validation has all losses."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss = super().loss(model, batch)
        error = (model.module if hasattr(model, "module") else model)(batch["x"]).detach() - batch["y"]
        absolute = (error.abs() * batch["mask"]).sum() / batch["mask"].sum()
        return {"loss": loss, "absolute": absolute, "constant": 2}


def train(place: Place, parts: bool) -> tuple[dict[str, float], dict[str, float], bytes]:
    recipe = (Parts if parts else Toy)(samples=12, dtype="float64")
    options = Options(max_steps=1, log_every_steps=1, run_dir=f"runs/{parts}")
    trainer = Trainer(
        recipe, batch=12, micro_batch=2, options=options, data=DataOptions(workers=0),
        place=replace(place, store=f"{place.store}-{parts}"),
    )  # fmt: skip
    metrics = trainer.fit()
    weights = torch.cat([p.detach().flatten() for p in trainer.module.parameters()]).numpy().tobytes()
    return metrics, trainer.validation, weights


def absolute(size: int) -> float:
    """The mean error of the first weights over all samples, in plain PyTorch."""
    torch.manual_seed(0)
    model = Toy(dtype="float64").model()
    rows = [Points(size, torch.float64)[i] for i in range(size)]
    x, y, mask = (torch.stack([row[name] for row in rows]) for name in ("x", "y", "mask"))
    with torch.no_grad():
        return float(((model(x) - y).abs() * mask).sum() / mask.sum())


@pytest.mark.parametrize("world", [1, 3])
def test_further_losses_are_means_over_all_items_and_change_no_weight(world):
    """The items of micro-batches and ranks differ in number."""
    plain = run_ranks(world, train, False)
    for (_, _, expected), (metrics, validation, weights) in zip(plain, run_ranks(world, train, True), strict=True):
        assert weights == expected and metrics["train/constant"] == pytest.approx(2.0)
        assert metrics["train/absolute"] == pytest.approx(absolute(12), rel=1e-9)
        assert list(validation) == ["val/loss", "val/absolute", "val/constant"] and validation["val/constant"] == 2.0


OTHER = [
    ({"other": torch.ones(())}, r"recipe\.loss\(\): returned a value of type dict; return the tensor 'loss'"),
    ({"loss": torch.ones(()), "a": torch.ones(2)}, r"returned a tensor of shape \(2,\) for 'a'; return the tensor"),
    ({"loss": torch.ones(()), "a": "b"}, r"returned a value of type str for 'a'; return the tensor 'loss'"),
]


@pytest.mark.parametrize(("value", "said"), OTHER)
def test_other_dicts_are_refused(value, said):
    with pytest.raises(ConfigError, match=said):
        NamedLosses(SimpleNamespace(loss=lambda model, batch: value), lambda: 0)(None, None)


class ValidatedAlone(Toy):
    """Its loss is right in training."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return super().loss(model, batch) if model.training else self.value


@pytest.mark.parametrize(("value", "said"), OTHER)
def test_other_dicts_of_a_validation_alone_are_refused(value, said):
    options = Options(max_steps=1, run_dir="runs/r")
    trainer = Trainer(ValidatedAlone(value), batch=12, options=options, data=DataOptions(workers=0), place=Place())
    with pytest.raises(ConfigError, match=said):
        trainer.loop.parts.evaluator.evaluate(trainer.eval_model)
    trainer.close()


def test_passes_outside_of_steps_and_repeated_ones_do_not_count():
    step: list[int | None] = [None]
    values = iter([1.0, 2.0, 3.0, 4.0])
    named = NamedLosses(
        SimpleNamespace(loss=lambda model, batch: {"loss": torch.ones(()), "a": next(values)}), lambda: step[0]
    )
    named(None, None)
    step[0] = 0
    for _ in range(3):  # the first ran out of memory, and was repeated
        named(None, None)
    assert named.sums([1, 3]) == {"a": (3.0 + 3 * 4.0, 4)}
