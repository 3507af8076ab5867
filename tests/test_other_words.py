"""A word of another trainer's gets a message that names ours, and ours exist."""

import re
from typing import Any

import pytest
from support.cli import ROOT
from support.configs import toy_config

from trainer.callbacks.bucket import Bucket
from trainer.config.check import check
from trainer.config.compose import in_our_words
from trainer.config.folders import choices
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.other_words import OURS, RENAMED, VALUES, WORDS


def refusal(key: str, value: Any) -> str:
    config = toy_config()
    section, _, name = key.rpartition(".")
    (config[section] if section else config)[name] = value
    with pytest.raises(ConfigError) as refused:
        check(config)
    return str(refused.value)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("trainer.fp16", "trainer.precision=fp16"),
        ("trainer.gpus", "trainer.devices=N"),
        ("gpu", "trainer.devices=N"),
        ("trainer.num_nodes", "trainer.nodes=N"),
        ("trainer.strategy", "'+callbacks=[shard]'; without it, ranks train with DDP"),
        ("trainer.accumulate", "accumulate=N"),
        ("trainer.accumulate_grad_batches", "accumulate=N"),
        ("trainer.gradient_accum", "accumulate=N"),
        ("gradient_accumulation_steps", "accumulate=N"),
        ("trainer.ddp_bucket", "trainer.ddp.bucket_mib"),
        ("trainer.fast_dev_run", "trainer.dry_run=true"),
        ("data.num_workers", "data.workers=N"),
        ("learning_rate", "optimizer.lr"),
    ],
)
def test_a_key_of_another_trainer_gets_ours(key, ours):
    assert refusal(key, 4) == f"{key}=4: no such key; here it is {ours}"


@pytest.mark.parametrize("key", ["trainer.local_rank", "local_rank", "trainer.max_time"])
def test_what_needs_no_key_is_to_be_left_out(key):
    assert re.match(rf"{key}=4: no such key; leave it out: ", refusal(key, 4))


def test_our_own_keys_in_the_wrong_section_are_found_first():
    assert refusal("max_steps", 4) == "max_steps=4: no such key; did you mean trainer.max_steps?"


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("trainer.precision", "16-mixed", "fp16"),
        ("trainer.precision", "bf16-mixed", "bf16"),
        ("trainer.precision", "bf16_mixed", "bf16"),
        ("trainer.precision", "BF16_Mixed", "bf16"),
        ("trainer.precision", "16_mixed", "fp16"),
        ("trainer.precision", "fp16_mixed", "fp16"),
        ("trainer.precision", "transformer_engine", "fp8"),
        ("trainer.precision", 16, "fp16"),
        ("trainer.accelerator", "gpu", "cuda"),
    ],
)
def test_a_value_of_another_trainer_gets_ours(key, value, ours):
    assert refusal(key, value).endswith(f"; give {key}={ours}")


def test_ours_exist_and_no_word_is_one_of_ours():
    config = toy_config()
    for ours in OURS:
        if ours.startswith("leave"):
            continue
        for name in re.findall(r"callbacks[.=]\[?(\w+)", ours):
            assert name in choices("callbacks", [ROOT / "conf"]), ours
        for key in re.findall(r"((?:\w+\.)*\w+)=", ours) if "callbacks" not in ours else ():
            node = config
            for part in key.split("."):
                assert part in node, ours
                node = node[part]
    assert not {key for key in (*config, *config["trainer"], *config["data"]) if key in WORDS} - {"accumulate"}
    for key, values in VALUES.items():
        section, name = key.split(".")
        for value in values.values():
            check(config | {section: config[section] | {name: value}})


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (
            "unrecognized arguments: --gpus=2",
            "--gpus=2: there is no such option; here it is trainer.devices=N; see --help",
        ),
        (
            "unrecognized arguments: --lr 3",
            "--lr 3: there is no such option; give settings as KEY=VALUE, without --; see",
        ),
        ("argument --cfg: expected one argument", "argument --cfg: expected one argument; see --help"),
    ],
)
def test_an_option_of_another_trainer_gets_our_key(said: str, fix: str) -> None:
    assert in_our_words(said).startswith(fix)


@pytest.mark.parametrize("key", RENAMED)
def test_a_key_of_an_earlier_version_gets_its_new_name(key: str) -> None:
    new = re.escape(RENAMED[key])
    section, _, name = key.rpartition(".")
    config = toy_config()
    config["callbacks"]["bucket"] = {"_target_": "trainer.callbacks.bucket.Bucket"}
    (config["data"] if section == "data" else config["callbacks"]["bucket"])[name] = 5
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}=5: no such key; it is now {new}$"):
        check(config)
    constructor: Any = {"data": DataOptions, "callbacks.bucket": Bucket}[section]
    with pytest.raises(ConfigError, match=rf"{name}=5: no such key; it is now {new}$"):
        constructor(**{name: 5})


def test_what_an_earlier_version_compared_gets_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"^trainer.accept=\[lanes\]: .*; it is now shuffle_shards$"):
        Options(accept=["lanes"])
