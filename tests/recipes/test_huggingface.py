"""Models of transformers as they are: losses and weights of transformers' own Trainer on the same batches."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import QUICK, run
from support.huggingface import STEPS, by_both, write_llama
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks
from support.runs import make

from recipes.huggingface import HuggingFace
from recipes.huggingface.data import Lines, open_data
from recipes.huggingface.recipe import collated
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = needs("transformers")


def write_bert(folder: Path) -> None:
    """Write a tiny classifier's config and tokenizer, without weights, and lines of text with a label."""
    from transformers import BertConfig
    from transformers.models.bert.tokenization_bert import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very"]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, vocab_size=len(words), num_labels=2, architectures=["BertForSequenceClassification"])
    config.save_pretrained(folder / "bert")
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder / "bert")
    texts = [("a very " * (i % 3) + ("good" if i % 2 else "bad") + " film", i % 2) for i in range(24)]
    (folder / "films.jsonl").write_text("\n".join(json.dumps({"text": t, "label": y}) for t, y in texts))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_losses_and_weights_are_those_of_transformers_trainer(world, tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate, as transformers' Trainer does: the extra [test]")
    write_llama(tmp_path)
    every = run_ranks(world, by_both, tmp_path) if world > 1 else [by_both(Place(), tmp_path)]
    for results in every:
        for ours, weights, theirs, expected in results:
            assert len(ours) == STEPS and ours == pytest.approx(theirs, rel=1e-5)
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_the_command_trains_on_text_and_exports_what_loads(tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    write_bert(tmp_path)
    arguments = {
        "per_device_train_batch_size": 4, "learning_rate": 0.01, "max_steps": 8, "warmup_steps": 2, "output_dir": "out",
        "lr_scheduler_type": "constant_with_warmup", "eval_strategy": "steps", "eval_steps": 4, "report_to": ["wandb"],
    }  # fmt: skip
    (tmp_path / "args.json").write_text(json.dumps(arguments))
    words = ["recipe=hf", "recipe.model=bert", "recipe.data=films.jsonl", "recipe.val_data=films.jsonl"]
    words += ["recipe.text=text", "recipe.args=args.json", "trainer.run_dir=runs/hf", "data.workers=1", *QUICK]
    done = run(words, tmp_path)
    assert done.code == 0, done.err
    assert "the weights are random" in done.out and "warning" not in done.out, done.out
    summary = json.loads((tmp_path / "runs/hf/summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (8, 32) and 0 <= summary["val/accuracy"] <= 1
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "runs/hf/export")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "runs/hf/export")(["a good film"], return_tensors="pt")
    assert model(**tokens).logits.shape == (1, 2)
    again = run([*words, "trainer.init_from=runs/hf/export", "trainer.run_dir=runs/again"], tmp_path)
    assert again.code == 0 and "weights from runs/hf/export/model.safetensors" in again.out, again.err
    (tmp_path / "new.jsonl").write_text('{"text": "a good film"}\n{"text": "a very very bad film"}\n')
    asked = ["runs/hf", "--devices", "1", "--output", "new-logits.jsonl", "recipe.val_data=new.jsonl"]
    told = run(asked, tmp_path, "trainer.tools.predict")
    assert told.code == 0 and "2 predictions" in told.out, told.err
    rows = [json.loads(line) for line in (tmp_path / "new-logits.jsonl").read_text().splitlines()]
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor([rows[0]["prediction"]]), model(**tokens).logits)


def test_predictions_are_what_the_model_gives_without_the_loss(tmp_path):
    write_llama(tmp_path)
    recipe = HuggingFace("llama", "lines.jsonl", "lines.jsonl")
    trainer = make(recipe, {}, partial(adamw, lr=1e-2), batch=3)
    found = trainer.predict()
    tokens = torch.tensor([json.loads(line)["input_ids"] for line in Path("lines.jsonl").read_text().splitlines()])
    with torch.no_grad():
        torch.testing.assert_close(found["prediction"], recipe.model()(tokens).logits)


def test_several_outputs_are_predicted_by_name(tmp_path):
    """Those of an encoder and a decoder, but for the cache of keys and values."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    model.save_pretrained(tmp_path / "t5")
    recipe, batch = HuggingFace(str(tmp_path / "t5"), "none"), {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"]
    assert {name: value.shape[0] for name, value in recipe.predict(model, batch).items()} == {
        "logits": 2, "encoder_last_hidden_state": 2,
    }  # fmt: skip
    experts: Any = partial(dict, loss=torch.ones(()), aux_loss=torch.ones(()), logits=torch.ones(2, 3))
    assert isinstance(recipe.predict(experts, {}), torch.Tensor)  # two losses are left out
    model.config.return_dict = False
    with refuses("recipe.model", "return_dict"):
        recipe.predict(model, batch)


def test_lines_are_read_at_their_places(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"n": 2}\nno JSON\n[3]')
    lines = Lines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert [lines[i]["n"] for i in range(3)] == [0, 1, 2] and len(lines) == 5
    for i, line in ((3, "line 2 is no JSON"), (4, "line 3 is no JSON object")):
        with pytest.raises(DataError, match=f"b.jsonl: {line}"):
            lines[i]
    same = Lines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    (tmp_path / "b.jsonl").write_text('{"n": 2}\nno JSON\n[4]')
    other = Lines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert same.fingerprint == lines.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("source", "words"), [("none.jsonl", "no such file"), (".", "is a folder without dataset_info.json")]
)
def test_data_that_is_not_there(source, words, tmp_path):
    with pytest.raises(ConfigError, match=f"recipe.data={source}: {words}"):
        open_data("recipe.data", source, "train")


def refusals(tmp_path: Path) -> Iterator[tuple[HuggingFace, str]]:
    data = str(tmp_path / "films.jsonl")
    yield HuggingFace(str(tmp_path / "none"), data), "recipe.model="
    yield HuggingFace(str(tmp_path / "bert"), data, architecture="BertTokenizer"), "is no model of transformers"
    yield (
        HuggingFace(str(tmp_path / "bert"), data, text="txt"),
        "recipe.text=txt: a sample has no such key; did you mean text",
    )
    yield HuggingFace(str(tmp_path / "bert"), data, collator="Padding"), "recipe.collator=Padding: is no data collator"
    yield HuggingFace(str(tmp_path / "bert"), data, architecture="BertModel"), "the model computes no loss from"
    yield HuggingFace(str(tmp_path / "bert"), data, lr_scheduler_type="line"), "recipe.lr_scheduler_type=line"


def test_mistakes_are_one_line(tmp_path):
    write_bert(tmp_path)
    for recipe, words in refusals(tmp_path):
        if recipe.text is None:
            recipe.text = "text"
        with pytest.raises(ConfigError) as refused:
            Trainer(
                recipe, {}, adamw, recipe.schedule, batch=4, options=Options(max_steps=1), data=DataOptions(workers=0)
            ).fit()
        assert words in str(refused.value) and "\n" not in str(refused.value), str(refused.value)


def test_a_folder_of_datasets_has_its_splits(tmp_path, monkeypatch):
    saved = {"train": [{"n": 0}], "test": [{"n": 1}, {"n": 2}]}
    stub = SimpleNamespace(load_from_disk=lambda folder: saved)  # the package brings pandas and more
    (tmp_path / "dataset_dict.json").write_text("{}")
    recipe = HuggingFace("none", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", stub)
    assert recipe.data("train") == saved["train"] and recipe.data("val") == saved["test"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refuses("recipe.data", "datasets", "install"):
        recipe.data("train")


def test_a_sample_is_the_json_of_a_shard_or_the_row_itself(tmp_path):
    write_bert(tmp_path)
    recipe = HuggingFace(str(tmp_path / "bert"), "shards-{0..3}.tar")
    assert recipe.data("train") == "shards-{0..3}.tar" and recipe.data("val") is None
    with refuses("recipe=hf", "split=test"):
        recipe.data("test")
    row = {"input_ids": [1, 2], "labels": 1, "note": "left out"}
    for sample in (row, {"json": row, "__key__": "a"}):
        assert recipe.transform(sample, np.random.default_rng(0)) == {"input_ids": [1, 2], "labels": 1}
    with refuses("recipe.data", "sample", "input_ids"):
        recipe.transform({"note": 1}, np.random.default_rng(0))


def test_the_weight_of_a_batch_counts_labels(tmp_path):
    write_llama(tmp_path)
    write_bert(tmp_path)
    causal, classifier = (HuggingFace(str(tmp_path / name), "x.jsonl") for name in ("llama", "bert"))
    labels = torch.tensor([[5, 6, 7], [-100, -100, 8]])
    assert causal.weight({"labels": labels}) == 3  # the first of each row predicts nothing
    assert classifier.weight({"labels": torch.tensor([0, 1, 0])}) == 3
    assert classifier.weight({"x": torch.zeros(4, 2), "labels": torch.zeros(4, 2)}) == 4


def test_a_new_head_has_the_number_of_labels_that_config_args_gives(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertModel(BertConfig(**sizes, vocab_size=10)).save_pretrained(tmp_path / "base")
    rows = [{"input_ids": [1, 2], "labels": label} for label in (0, 4)]

    def recipe(folder: str = "base", **given: Any) -> HuggingFace:
        own = {"architecture": "BertForSequenceClassification", "config_args": given}
        return HuggingFace(str(tmp_path / folder), "x.jsonl", **own)

    with refuses("recipe.data", "num_labels=2", "recipe.config_args.num_labels=5"):
        recipe().collate(rows)
    own = recipe(num_labels=5)
    torch.manual_seed(3)
    ours = own.model()
    torch.manual_seed(3)
    theirs = BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5)
    batch = own.collate(rows)
    assert torch.equal(own.loss(ours.eval(), batch), theirs.eval()(**batch).loss)
    with refuses("recipe.config_args.num_label", "num_labels"):
        recipe(num_label=5).model()
    ours.save_pretrained(tmp_path / "five")
    words = (
        r"five: classifier\.bias has the shape \(5,\), and the config asks for \(7,\); leave recipe\.config_args out"
    )
    with pytest.raises(ConfigError, match=words):
        recipe("five", num_labels=7).model()


class Weighted(HuggingFace):
    """The first example of transformers' page on its Trainer: `compute_loss` takes the labels out of the inputs."""

    def loss(self, model: Any, batch: Any) -> Any:
        labels = batch.pop("labels")
        return torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))(model(**batch).logits, labels)


def test_the_loss_of_a_subclass_is_the_loss_of_its_validation(tmp_path):
    write_bert(tmp_path)
    recipe = Weighted(str(tmp_path / "bert"), str(tmp_path / "films.jsonl"))
    model = recipe.model().eval()
    batch = {"input_ids": torch.tensor([[5, 7], [6, 7]]), "labels": torch.tensor([0, 1])}
    found = recipe.metrics(model, batch)
    assert (found["loss"][0] / found["loss"][1]).item() == pytest.approx(recipe.loss(model, dict(batch)).item())
    assert found["accuracy"][1] == len(batch["labels"])


def test_samples_of_several_lengths_without_a_tokenizer_are_one_line():
    from transformers.data.data_collator import default_data_collator

    with refuses("recipe.collator", "input_ids", "recipe.collator=DataCollatorWithPadding"):
        collated(default_data_collator, {}, True, [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": [1, 10], "labels": 1}, "input_ids has the number 10, .* vocab_size=10"),
        ({"input_ids": [1, 9], "labels": 2}, "labels has the number 2, .* num_labels=2"),
    ],
)
def test_a_number_that_the_model_has_no_place_for_is_one_line(batch, words, tmp_path):
    write_bert(tmp_path)
    recipe = HuggingFace(str(tmp_path / "bert"), "none.jsonl")
    assert recipe.collate([{"input_ids": [1, 9], "labels": 1}])["input_ids"].shape == (1, 2)
    with pytest.raises(ConfigError, match=rf"^recipe\.data: {words}"):
        recipe.collate([batch])


def test_a_tokenizer_without_padding_is_one_line_whose_fix_works(tmp_path):
    write_bert(tmp_path)
    samples = [{"input_ids": [1, 2]}, {"input_ids": [1]}]
    recipe = HuggingFace(str(tmp_path / "bert"), "none.jsonl", text="text")
    recipe.tokenizer.pad_token = None
    with refuses("recipe.text", "pad_token"):
        recipe.collate(samples)
    del recipe.collate
    recipe.tokenizer.pad_token = "[SEP]"
    assert recipe.collate(samples)["input_ids"].tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pickle_that_asks_for_code_is_one_line(sharded, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    from transformers import BertConfig

    BertConfig(**sizes, vocab_size=10).save_pretrained(tmp_path)
    name = "pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin"
    torch.save({"a": Path}, tmp_path / name)
    if sharded:
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    recipe = HuggingFace(model=str(tmp_path), architecture="AutoModelForMaskedLM", data="x")
    with refuses("recipe.model", "pytorch_model.bin", "model.save_pretrained(FOLDER)"):
        recipe.model()


@pytest.mark.parametrize("there", ["../secret.safetensors", "/secret.safetensors", "a/b.safetensors"])
def test_a_folders_lists_name_no_file_elsewhere(there, tmp_path, monkeypatch):
    """transformers and datasets would read it."""
    write_bert(tmp_path)
    (tmp_path / "bert" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": there}}))
    with refuses("recipe.model=bert", there):
        HuggingFace("bert", "films.jsonl").model()
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": there}]}))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=None))
    with refuses("recipe.data", "again", "save_to_disk"):
        open_data("recipe.data", str(saved), "train")


def test_code_beside_a_model_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    """Without an answer of ours, transformers asks on standard input; `yes` would run a stranger's code."""
    write_bert(tmp_path)
    (tmp_path / "bert" / "code.py").write_text("raise SystemExit('ran')")
    config = tmp_path / "bert" / "config.json"
    about = {**json.loads(config.read_text()), "model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    config.write_text(json.dumps(about))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "bert" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}})
    )
    for part in ("config", "tokenizer"):
        with pytest.raises(ConfigError, match="asks for code of its own, which is not run"):
            getattr(HuggingFace("bert", "films.jsonl", text="text"), part)


CODE = "from pathlib import Path\nPath('ran').mkdir()\nclass Config: pass\nclass Model: pass\n"


def bert_with_code(about: dict[str, Any]) -> None:
    """Write a model with code beside it, which its config.json names."""
    write_bert(Path())
    Path("bert/code.py").write_text(CODE)
    config = Path("bert/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), **about}))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("trust_remote_code", True),
        ("code_revision", "main"),
        ("auto_map", {"AutoModelForCausalLM": "code.Model"}),
        ("cache_dir", "elsewhere"),
        ("token", "s3cr3t"),
        ("subfolder", "../other"),
        ("_configuration_file", "other.json"),
    ],
)
def test_config_args_reach_no_code_and_no_other_files(word, value, tmp_path):
    """The config beside a checkpoint, which may be a stranger's, gives them, too."""
    bert_with_code({"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}})
    with pytest.raises(
        ConfigError, match=rf"^recipe\.config_args\.{word}: is a keyword of transformers' loader, .*out$"
    ):
        print(HuggingFace("bert", "films.jsonl", config_args={word: value}).config)
    assert not Path("ran").exists() and not Path("elsewhere").exists()


def test_each_keyword_of_the_loader_is_refused_in_config_args():
    """The keywords that transformers' own source takes out of those it is given."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils.hub import cached_files

    read = (AutoConfig.from_pretrained, PreTrainedConfig.from_pretrained, PreTrainedConfig._get_config_dict)
    source = "".join(map(inspect.getsource, read))
    names = set(re.findall(r"kwargs(?:\.pop\(|\.get\(|\[)['\"](\w+)['\"]", source))
    for function in (PreTrainedConfig.from_pretrained, cached_files):
        names |= {p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
    taken = names - {
        "model_type",
        "path_or_repo_id",
        "filenames",
        "pretrained_model_name_or_path",
    }  # no keyword of ours
    assert {"trust_remote_code", "cache_dir", "gguf_file"} <= taken
    for name in taken:
        with pytest.raises(ConfigError, match=rf"^recipe\.config_args\.{name}: is a keyword of"):
            HuggingFace("bert", "films.jsonl", config_args={name: None})


def test_a_model_that_only_its_own_code_has_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    """transformers asks on standard input once more as it builds a model with random weights."""
    bert_with_code({"auto_map": {"AutoModelForImageClassification": "code.Model"}})
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    recipe = HuggingFace("bert", "films.jsonl", architecture="AutoModelForImageClassification")
    with pytest.raises(ConfigError, match="asks for code of its own, which is not run"):
        recipe.model()
    assert not Path("ran").exists()


@pytest.mark.parametrize("place", ["config.json", "config_args"])
def test_a_kernel_of_the_hub_is_refused(place, tmp_path):
    given = {"attn_implementation": "stranger/kernel"}
    bert_with_code(given if place == "config.json" else {})
    recipe = HuggingFace("bert", "films.jsonl", config_args=given if place == "config_args" else None)
    with refuses("recipe.model=bert", "attn_implementation=stranger/kernel", "config.json"):
        recipe.model()


def test_samples_without_padding_in_one_row_have_the_loss_of_each(tmp_path):
    """A collator that takes no tokenizer gets none."""
    write_llama(tmp_path)
    recipe = HuggingFace(str(tmp_path / "llama"), "none.jsonl", collator="DataCollatorWithFlattening")
    model = recipe.model()
    rows = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
    alone = [recipe.loss(model, {"input_ids": torch.tensor([row]), "labels": torch.tensor([row])}) for row in rows]
    counts = [len(row) - 1 for row in rows]
    batch = recipe.collate([{"input_ids": row, "labels": row} for row in rows])
    mean = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    assert recipe.weight(batch) == sum(counts) and recipe.loss(model, batch).item() == pytest.approx(
        mean.item(), rel=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 1}, [0, 2.5]),
        ({"num_labels": 3, "problem_type": "regression"}, [[0, 1, 2], [0.5, 1, 2]]),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, [[0, 1], [1, 1]]),
    ],
)
def test_labels_that_are_no_class_are_floats(settings, labels, tmp_path):
    """Else the type of the first label of a batch would cut off the digits of the others."""
    from transformers import BertConfig

    write_bert(tmp_path)
    config = BertConfig.from_pretrained(tmp_path / "bert", **settings)
    config.save_pretrained(tmp_path / "bert")
    recipe = HuggingFace(str(tmp_path / "bert"), "none.jsonl")
    rows = [{"input_ids": [2, 5, 3], "label": label} for label in labels]
    batch = recipe.collate([recipe.transform(row, np.random.default_rng(0)) for row in rows])
    assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == labels
    assert recipe.loss(recipe.model(), batch).isfinite()


def test_quantized_weights_are_refused(tmp_path):
    write_llama(tmp_path)
    file = tmp_path / "llama/config.json"
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    with refuses("recipe.model", "config.json", "quantization_config"):
        HuggingFace(str(tmp_path / "llama"), "none.jsonl", pretrained=True).model()
