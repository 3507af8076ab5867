"""Parameters without a shape, and complex ones: trained, or refused with the fix before anything starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import refuses
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.callbacks.grad_compress import GradCompress
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import adamw
from trainer.optim.muon import Muon
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Raw:
    def __init__(self, make: Any) -> None:
        self.make = make

    def model(self) -> nn.Module:
        return self.make()

    def data(self, split: str) -> Any:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def called() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    model(torch.zeros(1, 4))
    return model


def made(make: Any, **options: Any) -> Trainer:
    return Trainer(Raw(make), batch=16, options=Options(max_steps=3, **options), data=DataOptions(workers=0))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_is_refused_with_the_fix_which_works():
    words = r"^recipe\.model\(\): 0\.weight has no shape yet, as in nn\.LazyLinear; call the model on a sample in model"
    with pytest.raises(ConfigError, match=words):
        made(lambda: nn.Sequential(nn.LazyLinear(1)))
    assert made(called).fit()["steps"] == 3


def test_complex_weights_train_as_in_a_bare_loop():
    ours = made(Complex, clip_norm=0.5)
    ours.fit()
    recipe, model = Raw(Complex), Complex()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.98), 1e-6, weight_decay=0.01)
    for _ in range(3):
        recipe.loss(model, recipe.data("train").tensors).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(ours.module.get_parameter("weight"), model.weight)


def test_real_weights_stay_fused():
    assert adamw([{"params": nn.Linear(1, 1).parameters()}]).defaults["fused"]


def test_muon_names_what_steps_complex_matrices():
    with pytest.raises(
        ConfigError, match=r"^optimizer=muon: takes real matrices, and one is complex; use optimizer=ad"
    ):
        Muon([{"params": [Complex().weight], "hidden": True}])


class Extra(nn.Linear):
    """Has a state that is no parameter and no buffer, in torch's own way."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__(4, 1)
        self.as_tensor, self.passes = as_tensor, 0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.passes) if self.as_tensor else {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = int(state)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(x) * self.passes


def test_an_extra_state_that_no_checkpoint_can_have_is_refused_with_the_fix_which_works():
    words = r"^recipe\.model\(\): its state_dict has _extra_state, .*; let get_extra_state return a tensor, or keep"
    with pytest.raises(ConfigError, match=words):
        made(lambda: Extra(False))
    straight = made(lambda: Extra(True), run_dir="runs/a")
    straight.fit()
    first = Trainer(
        Raw(lambda: Extra(True)), batch=16, options=Options(max_steps=2, run_dir="runs/b"), data=DataOptions(workers=0)
    )
    first.fit()
    resumed = made(lambda: Extra(True), run_dir="runs/b", resume="auto")
    resumed.fit()
    assert torch.equal(resumed.module.weight, straight.module.weight)  # pyright: ignore[reportArgumentType]


class Scaled(Raw):
    """The loss has a weight of its own, as ArcFace's and those of uncertainty weighting have."""

    def __init__(self, trains: bool = True, grad: bool = True) -> None:
        super().__init__(lambda: nn.Linear(4, 1))
        self.criterion, self.grad = nn.Linear(1, 1).requires_grad_(trains), grad

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            target = self.criterion(batch[1])
        return nn.functional.mse_loss(model(batch[0]), target)


def test_a_parameter_outside_of_the_model_that_the_loss_trains_is_refused():
    def train(recipe: Any) -> int:
        return Trainer(recipe, batch=16, options=Options(max_steps=1), data=DataOptions(workers=0)).fit()["steps"]

    with refuses("recipe.criterion.weight", "model()"):
        train(Scaled())
    assert train(Scaled(trains=False)) == train(Scaled(grad=False)) == 1  # frozen; a teacher without a graph

    class Inside(Scaled):
        def model(self) -> nn.Module:
            model = nn.Linear(4, 1)
            model.criterion = self.criterion
            return model

    assert train(Inside()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_value": 0.1}, r"trainer\.clip_value: "),
        ({"precision": "fp16"}, r"trainer\.precision=fp16: "),
    ],
)
def test_a_setting_of_real_weights_alone_is_refused_with_complex_ones(options, words):
    with pytest.raises(ConfigError, match=rf"^{words}.*, and weight is complex; leave it out, or keep "):
        made(Complex, **options)


def test_codecs_are_refused_with_complex_weights():
    callback = GradCompress("powersgd")
    with refuses("callbacks.grad_compress", "codecs"):
        callback.wrap_reduce(SimpleNamespace(module=Complex()), SimpleNamespace())
