"""LoRA through the Hugging Face adapter: losses of transformers' Trainer with peft, and what peft loads of an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.huggingface import STEPS, by_both, load, write_llama
from support.ranks import run_ranks
from torch import nn

pytest.importorskip("transformers", reason="needs transformers: the extra [recipes]")
pytest.importorskip("peft", reason="needs peft: the extra [lora]")
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}


def with_peft(folder: Path) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = load(folder)
    return get_peft_model(model, LoraConfig(**LORA))


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_weights_are_those_of_transformers_trainer(world, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="needs accelerate, as transformers' Trainer does: the extra [test]")
    write_llama(tmp_path)
    monkeypatch.chdir(tmp_path)
    base = load(tmp_path).state_dict()
    for results in run_ranks(world, by_both, tmp_path, LORA, with_peft):
        for ours, weights, theirs, expected in results:
            assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=1e-5)
            moved = 0
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
                moved += "lora_B" in name and bool(value.any())
            assert moved == 4
            for name, value in base.items():
                module, _, last = name.rpartition(".")
                own = next(
                    n
                    for n in (name, f"{module}.base_layer.{last}", f"{module}.original_module.{last}")
                    if f"base_model.model.{n}" in weights
                )
                assert torch.equal(weights[f"base_model.model.{own}"], value), name
