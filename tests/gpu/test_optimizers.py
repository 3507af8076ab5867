"""Optimizers on the GPU: 8-bit moments, steps in the backward pass, few launches, no growth with the parameters."""

from typing import Any

import pytest
import torch
from support.callbacks import CODECS
from support.gpu import ACCELERATOR, DEVICE, ON_GPU, allocated, on_device, only_gpu
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset, TensorDataset
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.comm.bucket import Bucket
from trainer.comm.reduce import AllReduce
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.optim.factories import adamw, adamw8bit, lamb
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = on_device
MIB = 2**20


def train(
    recipe: Any, optimizer: Any, run: str, callbacks: dict[str, Callback] | None = None, **options: Any
) -> Trainer:
    trainer = Trainer(
        recipe, callbacks, optimizer, batch=12, place=Place(), data=DataOptions(workers=0),
        options=Options(**{
            "run_dir": f"runs/{run}", "accelerator": ACCELERATOR, "precision": "fp32", "deterministic": True,
            "checkpoint": CheckpointOptions(every_steps=3, keep=9), "max_steps": 6, **options,
        }),
    )  # fmt: skip
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in trainer.module.parameters()])


def eight_bit(groups: Any) -> torch.optim.Optimizer:
    return adamw8bit(groups, lr=0.01, min_8bit_size=64)


def test_8_bit_moments_resume_bit_for_bit_and_train_as_adamw_does():
    pytest.importorskip("bitsandbytes")
    straight = train(Toy(width=64), eight_bit, "straight")
    resumed = train(Toy(width=64), eight_bit, "resumed", resume="ckpt/straight/step-00000003")
    plain = train(Toy(width=64), lambda groups: adamw(groups, lr=0.01), "plain")
    assert torch.equal(weights(straight), weights(resumed))
    kept = [value for state in straight.optimizer.state.values() for value in state.values()]
    assert any(isinstance(value, torch.Tensor) and value.dtype == torch.uint8 for value in kept)
    assert 0 < (weights(straight) - weights(plain)).abs().max() < 0.05


def test_steps_in_the_backward_pass_have_the_bits_of_steps_after_it():
    plain = train(Toy(depth=3), adamw, "plain")
    beside = train(Toy(depth=3), adamw, "beside", {"c": OptimizerInBackward()})
    assert torch.equal(weights(plain), weights(beside))


class Wide:
    """16 matrices of 4 MiB."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))

    def data(self, split: str) -> Dataset | None:
        return TensorDataset(torch.rand(12, 1024)) if split == "train" else None

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).square().mean()


class Peak(Callback):
    """MiB beyond those held when a step begins, from the third step on."""

    def __init__(self) -> None:
        self.held, self.most = 0, 0

    def on_step_end(self, trainer) -> None:
        if trainer.step > 2:
            self.most = max(self.most, torch.cuda.max_memory_allocated() - self.held)
        self.held = allocated()
        torch.cuda.reset_peak_memory_stats()


@only_gpu
def test_steps_in_the_backward_pass_hold_few_gradients():
    sizes = {}
    for name, callback in {"plain": None, "beside": OptimizerInBackward()}.items():
        peak = Peak()
        callbacks: dict[str, Callback] = {"peak": peak, **({"c": callback} if callback else {})}
        train(Wide(), lambda groups: torch.optim.SGD(groups, lr=0.01), name, callbacks)
        sizes[name] = peak.most / MIB
    assert sizes["plain"] > 60 and sizes["beside"] < 30, sizes


def launches(call: Any) -> int:
    """Kernels that a call launches; on a CPU, the operations that it makes."""
    call()  # the first one makes its state
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as seen:
        call()
    events = seen.events() or []
    return len(events) if not ON_GPU else sum(str(event.device_type).endswith("CUDA") for event in events)


BY_PIECE = ("powersgd", "sign", "topk between nodes")  # launch kernels for each parameter
NAMES = [pytest.param("lamb", marks=only_gpu), *(name for name in CODECS if name not in BY_PIECE)]


@pytest.mark.parametrize("name", NAMES)
def test_launches_do_not_grow_with_the_parameters_of_a_bucket(name):
    counts = []
    for number in (8, 32):
        params = [nn.Parameter(torch.randn(64, 64, device=DEVICE)) for _ in range(number)]
        for p in params:
            p.grad = torch.randn_like(p)
        if name == "lamb":
            counts.append(launches(lamb([{"params": params}]).step))
            continue
        compress = CODECS[name]()
        assert isinstance(compress, GradCompress)
        compress.codec.join(1, 0, 0)
        flat = torch.cat([p.detach().flatten() for p in params])
        counts.append(launches(lambda: compress.codec.mean(flat, flat, Bucket.of(params, 0), Itself())))  # noqa: B023
    few, many = counts
    assert many < 2 * few, counts


class Itself(AllReduce):
    """The mean over one rank."""

    def __init__(self) -> None:
        self.size = 1

    def __call__(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        return flat

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return own[None]

    def swap(self, rows: torch.Tensor) -> torch.Tensor:
        return rows
