"""A training step on one CUDA device: it waits for nothing, keeps nothing, and skips what overflows."""

import gc
from typing import Any

import pytest
import torch
from support.gpu import ACCELERATOR, ON_GPU, on_device, only_gpu
from torch import nn
from torch.utils.data import Dataset
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.monitors.step_timer import StepTimer
from trainer.monitors.throughput import PEAKS
from trainer.optim.factories import adamw, lamb, sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

MIB = 2**20

pytestmark = on_device


def train(recipe: Any, watch: Callback, optimizer: Any = adamw, accumulate: int = 1, **options: Any) -> Trainer:
    callbacks, data = {"watch": watch, **options.pop("callbacks", {})}, DataOptions(workers=0)
    trainer = Trainer(
        recipe, callbacks, optimizer, batch=12, micro_batch=12 // accumulate, place=Place(), data=data,
        options=Options(**{
            "run_dir": "runs/r", "accelerator": ACCELERATOR,
            "checkpoint": CheckpointOptions(every_steps=None), **options,
        }),
    )  # fmt: skip
    trainer.fit()
    return trainer


class HostWeights(Toy):
    """Without a count of what counts, which data workers would make."""

    def weight(self, batch: dict[str, Any]) -> int:
        return len(batch["x"])


class Strict(Callback):
    """Steps 3 to 6 raise where they wait for the device."""

    steps = 0

    def on_step_end(self, trainer) -> None:
        strict = 2 <= trainer.step < 6
        self.steps += strict
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("error" if strict else "default")


@pytest.mark.parametrize(
    ("optimizer", "setting"),
    [
        (adamw, {}), (sgd, {}), (lamb, {}), (adamw, {"accumulate": 3}), (adamw, {"clip_norm": 1.0}),
        (adamw, {"precision": "bf16"}), (adamw, {"precision": "bf16_params"}),
        (adamw, {"precision": "fp16"}), (adamw, {"callbacks": {"ema": EMA(0.9)}}),
        (adamw, {"callbacks": {"timer": StepTimer()}}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else value.__name__,
)  # fmt: skip
def test_a_step_that_is_not_logged_waits_for_nothing(optimizer, setting):
    strict = Strict()
    train(HostWeights(), strict, optimizer, max_steps=8, log_every_steps=100, **setting)
    assert strict.steps == 4


class Rows(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((2 * MIB,), float(i))  # 8 MiB


class Wide:
    """Of a small model on samples of 8 MiB: a step has 96."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 8)

    def data(self, split: str) -> Dataset | None:
        return Rows() if split == "train" else None

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch[:, :8]).square().mean()


class Memory(Callback):
    """MiB that are allocated after each step, and the most within each."""

    def __init__(self) -> None:
        self.held, self.peak = list[float](), list[float]()

    def on_step_end(self, trainer) -> None:
        self.held.append(torch.cuda.memory_allocated() / MIB)
        self.peak.append(torch.cuda.max_memory_allocated() / MIB)
        torch.cuda.reset_peak_memory_stats()


@only_gpu
def test_a_step_keeps_no_batch_for_the_next():
    memory = Memory()
    train(Wide(), memory, max_steps=30, accumulate=4)
    assert max(memory.held[2:]) - min(memory.held[2:]) < 50  # two micro-batches of 24 MiB, as far as they are ahead


@only_gpu
def test_accumulation_takes_the_memory_of_two_micro_batches():
    peaks = {}
    for accumulate in (1, 12):
        gc.collect()  # the trainer before, with its last batch
        memory = Memory()
        train(Wide(), memory, max_steps=6, accumulate=accumulate, run_dir=f"runs/{accumulate}")
        peaks[accumulate] = max(memory.peak[2:])
    assert peaks[12] < peaks[1] - 150  # two batches of 96 MiB at once, or of 8 MiB


class Overflowing(Toy):
    """Its second training loss has gradients that fp16 can't hold; the others are far below."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += model.training
        return super().loss(model, batch) * (1e30 if self.calls == 2 else 2**-8)


class Scales(Callback):
    def __init__(self) -> None:
        self.scales, self.weights = list[float](), list[torch.Tensor]()

    def on_step_end(self, trainer) -> None:
        self.scales.append(trainer.scaler.get_scale())
        self.weights.append(torch.cat([p.detach().flatten().cpu() for p in trainer.module.parameters()]))


@only_gpu  # float32 on a CPU holds these gradients
@pytest.mark.parametrize("optimizer", [adamw, sgd, lamb])
def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale(optimizer):
    watch = Scales()
    train(Overflowing(), watch, optimizer, max_steps=3, precision="fp16")
    assert watch.scales == [2.0**16, 2.0**15, 2.0**15]
    first, second, third = watch.weights
    assert torch.equal(first, second) and not torch.equal(second, third)


class Scaled(Toy):
    """As `Overflowing`, without the overflow."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * 2**-8


@only_gpu
def test_a_resume_after_a_skipped_step_has_the_same_bits_and_scale():
    options = {"precision": "fp16", "deterministic": True}
    straight, halves = Scales(), Scales()
    saves = CheckpointOptions(every_steps=2, keep=9)
    train(Overflowing(), straight, max_steps=5, checkpoint=saves, **options)
    train(Scaled(), halves, max_steps=5, run_dir="runs/halves", resume="ckpt/r/step-00000002", **options)
    assert halves.scales == straight.scales[2:] == [2.0**15] * 3
    assert all(map(torch.equal, halves.weights, straight.weights[2:]))


class Reserved(Callback):
    def __init__(self) -> None:
        self.mib = list[float]()

    def on_validation_end(self, trainer, metrics) -> None:
        self.mib.append(torch.cuda.memory_reserved() / MIB)


@only_gpu
def test_validations_do_not_reserve_more_and_more():
    reserved = Reserved()
    train(Toy(), reserved, max_steps=24, validate_every=1)
    assert len(reserved.mib) == 24 and reserved.mib[-1] <= reserved.mib[3]


@only_gpu
def test_the_peak_of_this_device_is_known():
    assert torch.cuda.get_device_name() in PEAKS
