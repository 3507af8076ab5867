"""LoRA through the Hugging Face adapter: losses of transformers' Trainer with peft; peft loads what is exported."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cli import QUICK, run
from support.huggingface import STEPS, by_both, load, write_llama
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks
from support.runs import make
from torch import Tensor, nn

from recipes.huggingface import HuggingFace
from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint.callback import ActivationCheckpoint
from trainer.callbacks.ema import EMA
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.shard.callback import Shard
from trainer.errors import ConfigError
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.tools.export import export
from trainer.tools.inference.stored import Request, evaluate, predict

pytestmark = needs("transformers", "peft")
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
WORDS = ["recipe=hf", "recipe.model=llama", "recipe.data=lines.jsonl", "recipe.val_data=lines.jsonl"]
TOLD = ["recipe.lora.r=4", "recipe.lora.lora_alpha=16", "recipe.lora.target_modules=[q_proj,v_proj]"]


def with_peft(folder: Path) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = load(folder)
    return get_peft_model(model, LoraConfig(**LORA))


def frozen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the base model under its own names."""
    own = {name: value for name, value in weights.items() if ".default." not in name}
    return {re.sub(r"^base_model\.model\.|\.base_layer|\.original_module", "", name): own[name] for name in own}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_weights_are_those_of_transformers_trainer(world, tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate, as transformers' Trainer does: the extra [test]")
    write_llama(tmp_path)
    base = load(tmp_path).state_dict()
    for results in run_ranks(world, by_both, tmp_path, LORA, with_peft):
        for ours, weights, theirs, expected in results:
            assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=1e-5)
            assert all(value.any() for name, value in expected.items() if "lora_B" in name)
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
            assert all(torch.equal(value, base[name]) for name, value in frozen(weights).items())


def trained(place: Place, name: str, callbacks: dict[str, Callback], lora: Any = LORA, **options: Any) -> Any:
    """Train in the current folder, with a checkpoint at each second step. Return the trainer after its fit."""
    recipe = HuggingFace("llama", "lines.jsonl", lora=lora)
    place = replace(place, store=f"{place.store}-{name}")
    optimizer = partial(adamw, lr=1e-2, weight_decay=0.1)
    made = make(recipe, callbacks, optimizer, batch=6, place=place, run_dir=f"runs/{name}", **options)
    made.fit()
    return made


def resumed(place: Place) -> tuple[list[str], int, str]:
    """Return the names that the optimizer steps, the elements that ranks reduce, and what a resume with r=8 says."""
    whole = trained(place, "whole", {})
    stepped = {p for group in whole.optimizer.param_groups for p in group["params"]}
    names = [name for name, p in whole.module.named_parameters() if p in stepped]
    assert not [name for name, p in whole.module.named_parameters() if p not in stepped and p.grad is not None]
    reduced = sum(whole.parameters[i].numel() for bucket in whole.buckets for i in bucket)
    trained(place, "rest", {}, resume="ckpt/whole/step-00000002")
    with pytest.raises(ConfigError) as refused:
        trained(place, "other", {}, LORA | {"r": 8}, resume="ckpt/whole/step-00000002")
    return names, reduced, str(refused.value)


@pytest.mark.slow
def test_a_resume_has_the_same_bits_and_adapters_alone_are_stepped(tmp_path):
    write_llama(tmp_path)
    names, reduced, refusal = run_ranks(3, resumed)[0]
    whole, rest = (tmp_path / "ckpt" / name / "step-00000004" for name in ("whole", "rest"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / file).read_bytes() == (rest / file).read_bytes()
    assert len(names) == 2 * 2 * 2 + 1 and all(".default." in name for name in names)
    weights = load_file(whole / "model.safetensors")
    assert reduced == sum(weights[name].numel() for name in names)
    base = load(tmp_path).state_dict()
    assert all(torch.equal(value, base[name]) for name, value in frozen(weights).items())
    assert "is a checkpoint of another model" in refusal and "\n" not in refusal


def composed(place: Place) -> dict[str, float]:
    """Return the loss of step 4, or of step 1 where a run goes on from the adapters of the plain one."""
    runs: dict[str, tuple[dict[str, Callback], dict[str, Any]]] = {
        "plain": ({}, {}),
        "overlap": ({"overlap": Overlap()}, {}),
        "ema": ({"ema": EMA(0.9)}, {}),
        "recomputed": ({"activation_checkpoint": ActivationCheckpoint()}, {}),
        "stage_1": ({"shard": Shard(stage=1)}, {}),
        "stage_3": ({"shard": Shard(stage=3), "ema": EMA(0.9)}, {}),
        "bf16": ({}, {"precision": "bf16"}),
        "first": ({}, {"max_steps": 1}),
        "again": ({}, {"init_from": "runs/plain/export", "max_steps": 1}),
        "again_stage_3": ({"shard": Shard(stage=3)}, {"init_from": "runs/plain/export", "max_steps": 1}),
    }
    return {
        name: trained(place, name, callbacks, log_every_steps=1, **options).summary["train/loss"]
        for name, (callbacks, options) in runs.items()
    }


@pytest.mark.slow
def test_callbacks_train_the_same_adapters(tmp_path):
    write_llama(tmp_path)
    losses = run_ranks(3, composed)[0]
    plain, others, bf16 = losses.pop("plain"), losses, losses.pop("bf16")
    stage_3, first, again, sharded = (others.pop(name) for name in ("stage_3", "first", "again", "again_stage_3"))
    assert again == pytest.approx(sharded, rel=1e-6) and abs(again - first) > 1e-4
    assert all(loss == plain for loss in others.values()), (plain, others)
    assert stage_3 == pytest.approx(plain, rel=1e-6) and bf16 == pytest.approx(plain, rel=1e-2) and bf16 != plain


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).view(1, 12)).logits


@pytest.mark.slow
def test_the_command_exports_what_peft_loads_and_a_merged_model(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write_llama(tmp_path)
    words = [*WORDS, *TOLD, "optimizer.lr=0.03", "trainer.max_steps=6", "trainer.run_dir=runs/hf", "data.workers=1"]
    done = run([*words, *QUICK], tmp_path)
    assert done.code == 0 and "448 of 7,184 parameters are trained" in done.out, done.err
    assert "warning" not in done.out, done.out
    checkpoint = Path("ckpt/hf/step-00000006")
    recipe = HuggingFace(
        "llama", "lines.jsonl", lora={"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    )
    model = recipe.model()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    expected = logits(model)
    assert (expected - logits(load(tmp_path))).abs().max() > 1e-3

    found = {path.name for path in Path("runs/hf/export").iterdir()}
    assert found == {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    again: Any = PeftModel.from_pretrained(load(tmp_path), "runs/hf/export")  # type: ignore[arg-type]
    assert torch.equal(logits(again), expected)

    files = ["recipe.model=llama", "recipe.data=lines.jsonl", "recipe.val_data=lines.jsonl"]
    export(str(checkpoint), Path("merged"), [*files, "recipe.merge_lora=true"])
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    assert not [name for name in merged.state_dict() if "lora" in name]
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)

    summary = json.loads(Path("runs/hf/summary.json").read_text())
    request = Request(str(checkpoint), files, "val", None)
    assert evaluate(request) == pytest.approx(
        {name: value for name, value in summary.items() if name.startswith("val/")}, rel=1e-6
    )
    tokens = [json.loads(line)["input_ids"] for line in Path("lines.jsonl").read_text().splitlines()]
    torch.testing.assert_close(predict(request)["prediction"], again(torch.tensor(tokens)).logits.detach())


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"lora": {"lora_alfa": 8}}, "recipe.lora.lora_alfa=8: no such key; did you mean lora_alpha?"
    yield {"lora": {"r": "8"}}, "recipe.lora.r=8: must be int, not str"
    yield {"lora": {"r": 0}}, "recipe.lora.r=0: must be at least 1"
    yield {"lora": {"init_lora_weights": "pissa"}}, "recipe.lora.init_lora_weights=pissa: changes the base weights"
    yield {"merge_lora": True}, "recipe.merge_lora=true: the run has no adapters"
    key = "recipe.lora.target_modules"
    yield (
        {"lora": {"target_modules": ["q_proj", "w_proj"]}},
        f"{key}=w_proj: the model has no such module; did you mean",
    )
    yield {"lora": {"target_modules": ["zzz"]}}, f"{key}=zzz: the model has no such module; there are down_proj, embed"
    yield {"lora": {"target_modules": r".*\.8\.q_proj"}}, f"{key}=.*\\.8\\.q_proj: the model has no such module"
    yield {"lora": {"modules_to_save": ["head"]}}, "recipe.lora.modules_to_save=head: the model has no such module"
    yield {"lora": {"lora_dropout": 2.0}}, "recipe.lora: dropout probability has to be between 0 and 1"
    yield {"lora": {}, "pretrained": False}, "gives random weights, and an exported adapter has none of them"


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    write_llama(tmp_path)
    for arguments, words in refusals():
        with pytest.raises(ConfigError) as refused:
            HuggingFace(str(tmp_path / "llama"), "lines.jsonl", **arguments).model()
        assert words in str(refused.value) and "\n" not in str(refused.value), str(refused.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else object())
    with refuses("recipe.lora", "'peft>=0.18,<0.22'"):
        HuggingFace("llama", "lines.jsonl", lora={})


def test_a_head_without_weights_is_trained_and_exported(tmp_path):
    """A classifier's head is random, and an adapter's folder has it only if the settings name it."""
    from peft import PeftModel
    from transformers import LlamaForSequenceClassification

    write_llama(tmp_path)
    recipe = partial(HuggingFace, str(tmp_path / "llama"), "x.jsonl", architecture="LlamaForSequenceClassification")
    with refuses("recipe.lora", "'recipe.lora.modules_to_save=[score]'"):
        recipe(lora={"target_modules": ["q_proj"]}).model()
    for settings in ({"modules_to_save": ["score"]}, {"task_type": "SEQ_CLS"}):
        made = recipe(lora={"target_modules": ["q_proj"], **settings})
        model = made.model()
        made.export(model, tmp_path / "out")
        base = LlamaForSequenceClassification.from_pretrained(tmp_path / "llama", pad_token_id=0)
        again: Any = PeftModel.from_pretrained(base, str(tmp_path / "out"))
        model.config.pad_token_id = 0
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("target", ["wte", "lm_head"])
def test_a_tied_weight_with_an_adapter_is_merged(target, tmp_path):
    """One of two tied weights has an adapter, so that they differ after the merge."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    lora = {"target_modules": ["c_attn", target], "fan_in_fan_out": True}
    recipe = HuggingFace(str(tmp_path / "gpt2"), "x.jsonl", lora=lora, merge_lora=True)
    model = recipe.model()
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recipe.export(model.eval(), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
