"""Inductor on a GPU: numbers near eager's, and a resume has the same bits."""

from typing import Any

import pytest
import torch
from support.gpu import ACCELERATOR, on_device
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = on_device


def train(run: str, callbacks: dict[str, Callback], **options: Any) -> torch.Tensor:
    trainer = Trainer(
        Toy(width=32, depth=3, dropout=0.1), callbacks, batch=12, place=Place(), data=DataOptions(workers=0),
        options=Options(**{
            "max_steps": 4, "run_dir": f"runs/{run}", "accelerator": ACCELERATOR, "precision": "fp32",
            "deterministic": True, "checkpoint": CheckpointOptions(every_steps=2), **options,
        }),
    )  # fmt: skip
    trainer.fit()
    return torch.cat([p.detach().flatten().cpu() for p in trainer.module.parameters()])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_params"])
def test_inductor_has_eagers_numbers_and_resumes_bit_for_bit(precision, tmp_path):
    def callbacks() -> dict[str, Callback]:
        return {"compile": Compile(fallback_random=True), "activation_checkpoint": ActivationCheckpoint()}

    plain = train("plain", {}, precision=precision)
    straight = train("straight", callbacks(), precision=precision)
    resumed = train("resumed", callbacks(), precision=precision, resume="ckpt/straight/step-00000002")
    assert torch.allclose(plain, straight, atol=1e-5 if precision == "fp32" else 1e-2)
    assert torch.equal(straight, resumed)
