"""FP8 on one CUDA device: its products run, losses are close to bf16's, and a resume has the same bits."""

from typing import Any

import pytest
import torch
from support.runs import make
from torch.profiler import ProfilerActivity, profile
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.compile import Compile
from trainer.optim.factories import adamw

cuda = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda or torch.cuda.get_device_capability() < (8, 9), reason="no CUDA device with FP8"),
]
CLOSE = 0.1  # of losses from 0.05 to 1


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.seen.append(trainer.metrics["train/loss"])


def train(precision: str, run: str, steps: int = 20, **more: Any) -> tuple[list[float], torch.Tensor]:
    losses, callbacks = Losses(), more.pop("callbacks", {})
    trainer = make(
        Toy(samples=960, width=256, depth=4), {"losses": losses, **callbacks}, adamw, batch=90, accelerator="cuda",
        precision=precision, max_steps=steps, log_every_steps=1, deterministic=True, run_dir=f"runs/{run}",
        checkpoint={"every_steps": 10}, **more,
    )  # fmt: skip
    trainer.fit()
    return losses.seen, torch.cat([p.detach().flatten() for p in trainer.module.parameters()])


def test_losses_are_close_to_bf16s_and_a_resume_has_the_same_bits():
    pytest.importorskip("torchao")
    bf16, _ = train("bf16", "bf16")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        fp8, weights = train("fp8", "fp8")
    assert {event.key: event.count for event in seen.key_averages()}["aten::_scaled_mm"] >= 3 * 4 * 20
    assert fp8 != bf16 and max(abs(a - b) for a, b in zip(fp8, bf16, strict=True)) < CLOSE
    resumed, again = train("fp8", "resumed", resume="ckpt/fp8/step-00000010")
    assert resumed == fp8[10:] and torch.equal(again, weights)


def test_compiled_blocks_are_close_too():
    pytest.importorskip("torchao")
    bf16, _ = train("bf16", "bf16")
    fp8, _ = train("fp8", "compiled", callbacks={"compile": Compile()})
    assert max(abs(a - b) for a, b in zip(fp8, bf16, strict=True)) < CLOSE
