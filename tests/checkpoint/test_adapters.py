"""Adapters that peft has written as initial weights: taken by their names, refused in a line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.needs import needs
from torch import nn

from trainer.checkpoint.pretrained import load_weights, weights_files
from trainer.errors import ConfigError

pytestmark = needs("peft")
SETTINGS = {"r": 2, "lora_alpha": 6, "target_modules": ["0", "1"], "modules_to_save": ["3"]}


def adapted(seed: int, **settings: Any) -> Any:
    """Return a model of the same base, with adapters of other values."""
    import peft

    torch.manual_seed(0)
    base: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = peft.get_peft_model(base, peft.LoraConfig(**SETTINGS | settings))
    torch.manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"bias": "all"}, {"use_rslora": True, "use_dora": True}])
def test_the_model_is_that_of_peft(settings: dict[str, Any], tmp_path: Path) -> None:
    saved, model = adapted(1, **settings), adapted(2, **settings)
    saved.save_pretrained(tmp_path)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    load_weights(model, str(tmp_path))
    x = torch.randn(5, 3)
    assert torch.equal(model.eval()(x), saved.eval()(x))
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    load_weights(other := adapted(3, **settings), str(tmp_path / "adapter_model.safetensors"))
    assert torch.equal(other.eval()(x), saved(x))


def refused(model: nn.Module, folder: Path) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as error:
        load_weights(model, str(folder))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    text = str(error.value)
    assert text.startswith(f"trainer.init_from={folder}: ") and "\n" not in text
    return text.removeprefix(f"trainer.init_from={folder}: ")


@pytest.mark.slow
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    adapted(1).save_pretrained(tmp_path)
    assert refused(nn.Linear(3, 4), tmp_path) == (
        "has adapters, and the model has none; give recipe.lora as in its adapter_config.json"
    )
    assert refused(adapted(2, lora_alpha=8), tmp_path) == (
        "its adapters were trained with lora_alpha=6, and recipe.lora has 8; give recipe.lora.lora_alpha as it was"
    )
    assert "4 have another shape" in refused(adapted(2, r=4), tmp_path)
    assert "0 weights are missing, 2 are unknown" in refused(adapted(2, target_modules=["0"]), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: value for name, value in weights.items() if ".0.lora_B" not in name}, file)
    assert "1 weights are missing" in refused(adapted(2), tmp_path)
    for content in ("{", "[]", json.dumps({"lora_alpha": 6})):
        (tmp_path / "adapter_config.json").write_text(content)
        assert refused(adapted(2), tmp_path).startswith("adapter_config.json: can't be read (")
    (tmp_path / "adapter_config.json").unlink()
    assert "MANIFEST.json" in refused(adapted(2), tmp_path)


def test_a_whole_model_goes_before_adapters(tmp_path: Path) -> None:
    for name in ("adapter_model.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
        assert weights_files(str(tmp_path)) == [tmp_path / name]
