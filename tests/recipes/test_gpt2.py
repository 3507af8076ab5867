"""The GPT-2 recipe: transformers' own loss, no look ahead, FLOPs by count, the export, the published sizes."""

import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from recipes.byte_pairs import END
from recipes.gpt2 import CausalLM, Gpt2
from trainer.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"
SIZES: dict[str, Any] = {"vocab": 300, "sequence": 40, "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.0}
FULL = ("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "gpt2_tiny")
PRESETS = ("gpt2_xl_shard", "gpt2_xl_pipeline", "gpt2_compile")
CALLBACKS = (["activation_checkpoint", "shard"], ["pipeline"], ["compile"])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Gpt2:
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"The quick brown Fox number {i} jumps over {i * 7} lazy dogs. " * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # a build sets it for the rest of the process
        recipe = Gpt2(text=str(folder), cache=str(tmp_path_factory.mktemp("cache")), **SIZES)
        assert recipe.corpus.shards("train")
    return recipe


@pytest.fixture(scope="module")
def model(recipe: Gpt2) -> CausalLM:
    torch.manual_seed(0)
    model = recipe.model().eval()
    with torch.no_grad():  # away from the start, where biases are 0
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def batch(size: int = 3) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 300, (size, 40), generator=torch.Generator().manual_seed(0))}


def test_loss_is_that_of_transformers(recipe: Gpt2, model: CausalLM):
    data = batch()
    with torch.no_grad():
        expected = model.gpt2(data["input_ids"], labels=data["input_ids"]).loss
        loss = recipe.loss(model, data)
        total, count = recipe.metrics(model, data)["loss"]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert recipe.weight(data) == count == 3 * 39 and total.item() == pytest.approx(count * expected.item(), rel=1e-5)
    logits = model.gpt2(data["input_ids"]).logits.double()
    by_hand = [
        (logits[i, t].logsumexp(0) - logits[i, t, data["input_ids"][i, t + 1]]).item()
        for i in range(3)
        for t in range(39)
    ]
    assert loss.item() == pytest.approx(math.fsum(by_hand) / len(by_hand), rel=1e-5)


@pytest.mark.parametrize(("length", "ends"), [(None, (40, 40, 40)), (8, (16, 24, 40))])
def test_no_prediction_sees_a_later_token(length: int | None, ends: tuple[int, ...], model: CausalLM):
    """Another token changes the predictions from its place on; with parts, up to the end of its part."""
    plain, states = CausalLM(model.gpt2), []
    ids = batch(1)["input_ids"]
    hook = model.gpt2.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with hook, torch.no_grad():
        plain(ids, length)
        for place, end in zip((11, 23, 38), ends, strict=True):
            other = ids.clone()
            other[0, place] = (ids[0, place] + 1) % 300
            plain(other, length)
            changed = (states[-1] != states[0]).any(1).nonzero().flatten().tolist()
            assert changed == list(range(place, min(end, 39)))


@pytest.mark.parametrize("length", [8, 20])
def test_parts_of_a_sequence_are_sequences_of_their_own(length: int, recipe: Gpt2, model: CausalLM):
    """Each part's loss alone, and the first token of a part after the last of the one before: nothing is lost."""
    data = batch()
    ids = data["input_ids"]
    with torch.no_grad():
        logits = model.gpt2(ids.reshape(-1, length)).logits.view(3, 40, 300)
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        recipe.length = length
        try:
            found = recipe.loss(model, data)
            whole, count = recipe.metrics(model, data)["loss"]
        finally:
            recipe.length = None
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(whole / count, recipe.loss(model, data))  # validation has whole sequences
    assert found != whole / count


@pytest.mark.parametrize("chunks", [2, 8])
def test_a_loss_in_chunks_has_the_same_gradients(chunks: int, recipe: Gpt2, model: CausalLM):
    other = Gpt2(**SIZES, loss_chunks=chunks).model()
    other.load_state_dict(model.state_dict())
    found = []
    for net in (CausalLM(model.gpt2, 1), other):
        net.zero_grad()
        loss = recipe.loss(net, batch())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    model.zero_grad()


def test_flops_by_count(model: CausalLM):
    recipe = Gpt2(**SIZES, loss_chunks=1)
    plain = CausalLM(model.gpt2)
    model.gpt2.set_attn_implementation("eager")  # whose products the counter knows on the CPU
    try:
        with FlopCounterMode(display=False) as counter:
            recipe.loss(plain, batch()).backward()
    finally:
        model.gpt2.set_attn_implementation("sdpa")
        model.zero_grad()
    assert recipe.flops_per_sample * 3 == counter.get_total_flops()
    assert recipe.tokens_per_sample == 40


def test_export_loads_with_the_same_loss_and_tokens(recipe: Gpt2, model: CausalLM, tmp_path: Path):
    from transformers import AutoTokenizer, GPT2LMHeadModel

    recipe.export(model, tmp_path)
    loaded, tokenizer = GPT2LMHeadModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    data = batch()
    with torch.no_grad():
        torch.testing.assert_close(loaded(data["input_ids"]).logits, model.gpt2(data["input_ids"]).logits)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert tokenizer.get_vocab() == recipe.corpus.vocabulary() and tokenizer.model_max_length == 40
    text = "The  quick brown Fox\n\td\u00e9j\u00e0 \u4e2d"
    ids = tokenizer(text + "<|endoftext|>").input_ids
    assert ids[-1] == END == tokenizer.eos_token_id == loaded.config.eos_token_id and END not in ids[:-1]
    assert tokenizer.decode(ids[:-1]) == text
    written = (Path(str(recipe.text)) / "0.txt").read_text()
    rows = [np.asarray(row) for row in shard_rows(recipe)]
    document = tokenizer(written).input_ids
    stream = np.concatenate(rows).tolist()
    assert any(stream[i : i + len(document)] == document for i in range(len(stream)))


def shard_rows(recipe: Gpt2) -> list[np.ndarray]:
    import io
    import tarfile

    rows = []
    for shard in recipe.corpus.shards("train") + recipe.corpus.shards("val"):
        with tarfile.open(shard) as tar:
            rows += [np.load(io.BytesIO(tar.extractfile(member).read())) for member in tar]  # pyright: ignore
    return rows


def test_recipe_yields_its_data(recipe: Gpt2):
    assert recipe.data("train") == recipe.corpus.shards("train") and "val-" in recipe.data("val")[0].name
    assert recipe.summary() == {"unigram_entropy_nats": recipe.corpus.meta["unigram_entropy_nats"]}
    sample = recipe.transform({"npy": np.arange(40, dtype=np.uint16)}, np.random.default_rng(0))
    assert sample["input_ids"].dtype == np.int64 and sample["input_ids"].tolist() == list(range(40))


@pytest.mark.slow
def test_importing_and_constructing_does_not_import_transformers():
    code = (
        "import sys; from recipes.gpt2 import Gpt2; Gpt2(); assert not {'transformers', 'tokenizers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"heads": 5}, "recipe.heads=5: must divide recipe.hidden=768"),
        ({"heads": 0}, "recipe.heads=0: must be at least 1"),
        ({"layers": -1}, "recipe.layers=-1: must be at least 1"),
        ({"loss_chunks": 0}, "recipe.loss_chunks=0: must be at least 1"),
        ({"dropout": 1.0}, "recipe.dropout=1.0: must be at least 0, and below 1"),
        ({"vocab": 256}, "recipe.vocab=256: must be at least 257"),
        ({"sequence": 4}, "recipe.sequence=4: must be at least 8"),
        ({"val_fraction": 0.0}, "recipe.val_fraction=0.0: "),
    ],
)
def test_refused(knobs: dict[str, Any], reason: str):
    with pytest.raises(ConfigError) as caught:
        Gpt2(**knobs)
    assert str(caught.value).startswith(reason)


def composed(name: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"recipe={name}"])


def test_the_configs_differ_in_values_only_and_give_every_knob():
    files = {name: OmegaConf.load(CONF / "recipe" / f"{name}.yaml") for name in FULL}
    parameters = {*inspect.signature(Gpt2).parameters, "_target_"}
    for name, file in files.items():
        assert {*file.recipe} == parameters, name
        assert {*file} == {*files["gpt2"]} and {*file.optimizer} == {*files["gpt2"].optimizer}
        assert composed(name).recipe == file.recipe
        assert composed(name).schedule._target_.endswith("Cosine")
        Gpt2(**{key: value for key, value in file.recipe.items() if key != "_target_"})


@pytest.mark.parametrize(("name", "callbacks"), list(zip(PRESETS, CALLBACKS)))
def test_the_presets_are_a_size_with_callbacks(name: str, callbacks: list[str]):
    preset, size = composed(name), composed(name.rpartition("_")[0])
    assert preset.recipe == size.recipe and preset.trainer.precision == "bf16"
    assert sorted({*preset.callbacks} - {*size.callbacks}) == callbacks
    assert (preset.optimizer, preset.schedule, preset.batch) == (size.optimizer, size.schedule, size.batch)


@pytest.mark.parametrize(
    ("name", "sizes", "millions"),
    [
        ("gpt2", (12, 768, 12), 124.4), ("gpt2_medium", (24, 1024, 16), 354.8),
        ("gpt2_large", (36, 1280, 20), 774.0), ("gpt2_xl", (48, 1600, 25), 1557.6),
    ],
)  # fmt: skip
def test_sizes_are_the_published_ones(name: str, sizes: tuple[int, int, int], millions: float):
    knobs = OmegaConf.load(CONF / "recipe" / f"{name}.yaml").recipe
    assert (knobs.layers, knobs.hidden, knobs.heads) == sizes and (knobs.sequence, knobs.vocab) == (1024, 50257)
    with torch.device("meta"):
        model = Gpt2(**{key: value for key, value in knobs.items() if key != "_target_"}).model()
    model.gpt2.tie_weights()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
