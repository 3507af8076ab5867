"""A JSON file of transformers' TrainingArguments becomes arguments of the command."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.huggingface.honoured import ARGUMENTS, KEYS
from trainer.config.check import check
from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.config.training_arguments import expand, translate
from trainer.errors import ConfigError


def test_training_arguments_become_words():
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 5e-5, "adam_beta1": 0.8,
        "num_train_epochs": 3.0, "max_steps": -1, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "bf16": True,
        "gradient_checkpointing": True, "save_steps": 100, "save_total_limit": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_accuracy", "greater_is_better": True, "max_grad_norm": 0.0,
        "optim": "adamw_8bit", "output_dir": "out", "label_smoothing_factor": 0.0, "group_by_length": False,
        "torch_compile": False,
    }  # fmt: skip
    words = translate(given, "recipe.args=x.json", 2)
    assert words[0] == "optimizer=adamw8bit" and words[1] == "+callbacks=[activation_checkpoint]"
    assert set(words[2:]) == {
        "optimizer.lr=5e-05", "trainer.max_epochs=3.0", "recipe.lr_scheduler_type=cosine", "recipe.warmup_steps=0.1",
        "batch=16", "micro_batch=4", "accumulate=2", "optimizer.betas=[0.8,0.999]", "trainer.clip_norm=null",
        "trainer.checkpoint.every_steps=100", "trainer.checkpoint.keep=2", "trainer.precision=bf16",
        "trainer.checkpoint.keep_best='max val/accuracy'",
        "recipe.epochs={num_train_epochs:3.0,dataloader_drop_last:false,micro_batch:4,accumulate:2}",
    }  # fmt: skip


def test_one_task_of_srun_on_each_node_starts_the_typed_ranks(tmp_path, monkeypatch):
    """Two nodes of eight ranks, eight samples on each."""
    (file := tmp_path / "args.json").write_text(json.dumps({"per_device_train_batch_size": 8}))
    slurm = {"STEP_NUM_TASKS": "2", "STEP_NUM_NODES": "2", "STEP_NODELIST": "a[1-2]", "JOB_ID": "1", "STEP_ID": "0"}
    for name, value in (slurm | {"PROCID": "0", "LOCALID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for devices, batch in (("trainer.devices=8", 128), ("trainer.devices=auto", 16)):
        words, _ = expand([f"recipe.args={file}", devices])
        assert f"batch={batch}" in words


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (
            {"metric_for_best_model": "accuracy", "load_best_model_at_end": True},
            "trainer.checkpoint.keep_best='max val/accuracy'",
        ),
        (
            {"metric_for_best_model": "eval_loss", "load_best_model_at_end": True},
            "trainer.checkpoint.keep_best=val/loss",
        ),
        ({"auto_find_batch_size": True}, "+callbacks=[auto_batch]"),
        ({"full_determinism": True}, "trainer.deterministic=true"),
        ({"use_cpu": True}, "trainer.accelerator=cpu"),
        ({"data_seed": 42}, "trainer.precision=fp32"),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, "recipe.warmup_steps=0.1"),
        ({"warmup_steps": 20, "warmup_ratio": 0.1}, "recipe.warmup_steps=20"),
        ({"train_sampling_strategy": "random"}, "trainer.precision=fp32"),
    ],
)
def test_an_argument_with_a_counterpart(given, word):
    assert word in translate(given, "recipe.args=x.json", 1)


def test_each_argument_that_is_given_sets_its_key():
    """One by one, with what the argument needs beside it; the others are compared with transformers' own numbers."""
    best, every = {"load_best_model_at_end": True}, "trainer.validate_every=7"
    rows: dict[str, tuple[Any, str]] = {
        "optim": ("adamw_8bit", "optimizer=adamw8bit"),
        "seed": (7, "trainer.seed=7"),
        "data_seed": (42, "trainer.precision=fp32"),
        "full_determinism": (True, "trainer.deterministic=true"),
        "bf16": (True, "trainer.precision=bf16"),
        "fp16": (True, "trainer.precision=fp16"),
        "tf32": (True, "trainer.precision=tf32"),
        "use_cpu": (True, "trainer.accelerator=cpu"),
        "activation_checkpointing": (True, "+callbacks=[activation_checkpoint]"),
        "gradient_checkpointing": (True, "+callbacks=[activation_checkpoint]"),
        "torch_compile": (True, "+callbacks=[compile]"),
        "auto_find_batch_size": (True, "+callbacks=[auto_batch]"),
        "logging_strategy": ("steps", "trainer.log_every_steps=5"),
        "logging_steps": (5, "trainer.log_every_steps=5"),
        "eval_strategy": ("epoch", "trainer.validate_every='1 epochs'"),
        "eval_steps": (7, every),
        "save_strategy": ("steps", "trainer.checkpoint.every_steps=9"),
        "save_steps": (9, "trainer.checkpoint.every_steps=9"),
        "save_total_limit": (3, "trainer.checkpoint.keep=3"),
        "load_best_model_at_end": (True, "trainer.checkpoint.keep_best=val/loss"),
        "metric_for_best_model": ("accuracy", "trainer.checkpoint.keep_best='max val/accuracy'"),
        "greater_is_better": (True, "trainer.checkpoint.keep_best='max val/loss'"),
        "dataloader_num_workers": (3, "data.workers=3"),
        "dataloader_prefetch_factor": (4, "data.prefetch=4"),
        "ddp_bucket_cap_mb": (8, "trainer.ddp.bucket_mib=8"),
        "ddp_find_unused_parameters": (True, "trainer.ddp.find_unused_parameters=true"),
        "ddp_static_graph": (True, "trainer.ddp.static_graph=true"),
    }
    needs = {"logging_strategy": {"logging_steps": 5}, "eval_steps": {"eval_strategy": "steps"}}
    needs |= {"save_strategy": {"save_steps": 9}, "metric_for_best_model": best, "greater_is_better": best}
    for name, (value, word) in rows.items():
        assert word in translate({name: value, **needs.get(name, {})}, "recipe.args=x.json", 1), name
    assert rows.keys() == {name for name, test in ARGUMENTS.given.items() if test == KEYS}


@pytest.mark.parametrize(
    ("given", "level", "told"),
    [
        (
            {"output_dir": "out", "save_strategy": "epoch", "dataloader_drop_last": False},
            logging.INFO,
            "these name files, reports or evaluation, and change nothing here: output_dir, save_strategy",
        ),
        (
            {"logging_strategy": "epoch", "save_steps": 10, "save_strategy": "no", "eval_steps": 10},
            logging.INFO,
            "these name files, reports or evaluation, and change nothing here: "
            "eval_steps, logging_strategy, save_steps, save_strategy",
        ),
        (
            {"metric_for_best_model": "accuracy", "greater_is_better": False, "logging_strategy": "steps"},
            logging.INFO,
            "these name files, reports or evaluation, and change nothing here: "
            "greater_is_better, metric_for_best_model",
        ),
        (
            {"optim": "sgd", "adam_beta2": 0.99, "adam_epsilon": 1e-8},
            logging.INFO,
            "optim=sgd takes none of these, as in transformers: adam_beta2, adam_epsilon",
        ),
        (
            {"warmup_steps": 20, "warmup_ratio": 0.1},
            logging.INFO,
            "warmup_steps=20 counts instead of warmup_ratio, as in transformers",
        ),
        (
            {"save_total_limit": 1},
            logging.INFO,
            "save_total_limit=1: 2 checkpoints are kept, so that one is whole while the next is written",
        ),
        (
            {"load_best_model_at_end": True},
            logging.WARNING,
            "load_best_model_at_end=true: export/ has the last weights; "
            "'echelon export ckpt/best.pt FOLDER' writes the best",
        ),
    ],
)
def test_what_is_not_done_is_told(given, level, told, tmp_path):
    Path("a.json").write_text(json.dumps(given))
    _, lines = expand(["recipe.args=a.json", "trainer.devices=1"])
    assert (level, f"recipe.args=a.json: {told}") in lines


def test_sgd_passes_the_check_and_has_no_momentum_as_in_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both
    given = {"optim": "sgd", "learning_rate": 0.5, "adam_beta1": 0.9, "adam_epsilon": 1e-8, "use_cpu": True}
    Path("a.json").write_text(json.dumps(given))
    words = ["recipe=hf", "recipe.model=m", "recipe.data=d", "recipe.args=a.json", "trainer.max_steps=3"]
    (job,) = compose(words, [CONF])
    check(job.config)
    settings = {key: value for key, value in job.config["optimizer"].items() if not key.startswith("_")}
    assert settings == {"lr": 0.5, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "groups": None}
    assert (job.config["trainer"]["accelerator"], job.config["batch"]) == ("cpu", 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deepspeed": "zero.json"}, r"deepspeed=zero.json: Echelon has no such setting; .*shard"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: Echelon has no such setting; write a recipe"),
        (
            {"train_sampling_strategy": "group_by_length"},
            "train_sampling_strategy=group_by_length: Echelon has no such",
        ),
        (
            {"average_tokens_across_devices": False},
            "average_tokens_across_devices=false: Echelon counts the tokens of all",
        ),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=true: batches are per device here"),
        ({"eval_strategy": "steps", "eval_steps": 0.2}, "eval_steps=0.2: is a part of the run; give a whole number"),
        ({"data_seed": 7, "seed": 3}, "data_seed=7: the data has the seed of the run; remove it"),
        ({"optim": "lion_32bit"}, "optim=lion_32bit: Echelon has no such optimizer; give adamw_torch"),
    ],
)
def test_training_arguments_that_would_be_lost_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        translate(given, "recipe.args=x.json", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"save_steps": "100"}', 'save_steps="100": must be a number'),
        ('{"max_steps": true}', "max_steps=true: must be a number"),
        ('{"logging_steps": Infinity}', "logging_steps=Infinity: must be a number"),
        (
            '{"per_device_train_batch_size": "8", "gradient_accumulation_steps": 2}',
            'per_device_train_batch_size="8": must be a number',
        ),
        ('{"accelerator_config": "x.json"}', 'accelerator_config="x.json": must be an object; give that of the file'),
        ('{"optim": ["sgd"]}', r"optim=\['sgd'\]: Echelon has no such optimizer"),
    ],
)
def test_values_of_another_type_are_refused(text, words, tmp_path):
    Path("a.json").write_text(text)
    with pytest.raises(ConfigError, match=f"^recipe.args=a.json: {words}"):
        expand(["recipe.args=a.json", "trainer.devices=1"])


def test_null_is_the_default(tmp_path):
    names = ("max_steps", "logging_steps", "save_steps", "per_device_train_batch_size", "warmup_ratio", "optim")
    Path("a.json").write_text(json.dumps(dict.fromkeys([*names, "adam_beta1", "max_grad_norm", "eval_delay"])))
    words, lines = expand(["recipe.args=a.json", "trainer.devices=2"])
    assert words[:-1] == [
        "batch=16", "micro_batch=8", "accumulate=1",
        "recipe.epochs={num_train_epochs:3.0,dataloader_drop_last:false,micro_batch:8,accumulate:1}",
        "trainer.clip_norm=null", "trainer.precision=fp32",
    ]  # fmt: skip
    assert not lines


@pytest.mark.parametrize(
    ("typed", "kept", "told"),
    [("lars", [], "adam_beta1, optim"), ("adamw", ["optimizer.betas=[0.8,0.999]"], "optim")],
)
def test_a_typed_optimizer_wins(typed, kept, told, tmp_path):
    Path("a.json").write_text('{"optim": "sgd", "adam_beta1": 0.8, "learning_rate": 0.5}')
    words, lines = expand(["recipe.args=a.json", "trainer.devices=1", f"optimizer={typed}"])
    assert [word for word in words if word.startswith("optimizer")] == ["optimizer.lr=0.5", *kept, f"optimizer={typed}"]
    assert lines == [(logging.INFO, f"recipe.args=a.json: a typed optimizer replaces {told}")]


def test_a_file_of_arguments_that_is_none(tmp_path):
    assert expand(["batch=4"]) == (["batch=4"], [])
    Path("list.json").write_text("[]")
    for file, words in (("none.json", "can't be read"), ("list.json", "is no JSON object")):
        with pytest.raises(ConfigError, match=f"recipe.args={file}: {words}"):
            expand([f"recipe.args={file}"])
    Path("args.json").write_text('{"learning_rate": 0.1}')
    words, _ = expand(["trainer.devices=3", "recipe.args=args.json", "optimizer.lr=0.2"])
    assert words[-2:] == ["trainer.devices=3", "optimizer.lr=0.2"] and "batch=24" in words
