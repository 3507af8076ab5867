"""Reads the arguments of transformers' Trainer, a JSON file, as arguments of the command: `recipe.args=FILE`.

Typed arguments come after them, and therefore take precedence.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainer.config.training_arguments_table import (
    GIVEN,
    OLD,
    OLD_DEFAULTS,
    OLD_WITHOUT_EFFECT,
    REFUSED,
    SEQ2SEQ,
    WITHOUT_EFFECT,
)
from trainer.errors import ConfigError
from trainer.process.environment import detect

WORD = re.compile(r"\+*recipe\.args=(.*)")
OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit",
    "sgd": "sgd",
}  # fmt: skip
SAME = {  # name there -> key here, of the same meaning
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "num_train_epochs": "trainer.max_epochs",
    "seed": "trainer.seed",
    "lr_scheduler_type": "recipe.lr_scheduler_type",
    "warmup_steps": "recipe.warmup_steps",
    "dataloader_num_workers": "data.workers",
    "ddp_bucket_cap_mb": "trainer.ddp.bucket_mib",
    "ddp_find_unused_parameters": "trainer.ddp.find_unused_parameters",
    "ddp_static_graph": "trainer.ddp.static_graph",
    "dataloader_prefetch_factor": "data.prefetch",
}
CALLBACKS = {
    "gradient_checkpointing": "activation_checkpoint",
    "activation_checkpointing": "activation_checkpoint",
    "torch_compile": "compile",
    "auto_find_batch_size": "auto_batch",
}
NUMBERS = {
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs",
    "max_steps", "warmup_steps", "warmup_ratio", "per_device_train_batch_size", "gradient_accumulation_steps",
    "logging_steps", "eval_steps", "save_steps", "save_total_limit", "seed", "data_seed", "dataloader_num_workers",
    "dataloader_prefetch_factor", "ddp_bucket_cap_mb",
}  # fmt: skip
SWITCHES = {
    "bf16", "fp16", "tf32", "gradient_checkpointing", "activation_checkpointing", "torch_compile", "use_cpu", "no_cuda",
    "auto_find_batch_size", "full_determinism", "load_best_model_at_end", "greater_is_better", "dataloader_drop_last",
    "average_tokens_across_devices", "ddp_find_unused_parameters", "ddp_static_graph",
}  # fmt: skip
SWITCHED = {"remove_unused_columns", "dataloader_in_order", "ddp_broadcast_buffers"}  # of which false asks for a change
OF_CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
OBJECTS = {"accelerator_config", "lr_scheduler_kwargs", *OF_CHECKPOINTING}
OLD_GIVEN = {"warmup_ratio", "no_cuda"}  # of older versions, with the same meaning
PARTS = {  # of accelerator_config: the values that ask for nothing else than the default
    "split_batches": (False, "batches are per device here; set it to false"),
    "even_batches": (True, "all ranks make the same steps; set it to true"),
    "gradient_accumulation_kwargs": (None, "give gradient_accumulation_steps; set it to null"),
    "dispatch_batches": (None, "each rank reads its own samples; set it to null"),
    "use_seedable_sampler": (True, "a seed decides on the order; set it to true"),
    "non_blocking": (None, ""),  # copies do not wait in either case
    "use_configured_state": (False, "Echelon has no state of accelerate; set it to false"),
}
CHOICES = {  # texts that transformers' constructor takes -> what Echelon does with them
    "logging_strategy": ("no", "steps", "epoch"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "hub_strategy": ("end", "every_save", "checkpoint", "all_checkpoints"),
    "lr_scheduler_type": (
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
    ),
}  # fmt: skip
UNTYPED = re.compile(r"\+*(trainer\.max_steps|trainer\.max_epochs|batch|micro_batch|accumulate|schedule)=")
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
OF_ADAM = {"adam_beta1": "optimizer.betas", "adam_beta2": "optimizer.betas", "adam_epsilon": "optimizer.eps"}


def expand(words: list[str]) -> tuple[list[str], list[tuple[int, str]]]:
    """Replace `recipe.args=FILE` in the command's arguments with the translated file, before all other arguments.

    Return the arguments, and messages for the log, each with its level.
    """
    found = [match[1] for word in words if (match := WORD.fullmatch(word))]
    if not found:
        return words, []
    rest = [word for word in words if not WORD.fullmatch(word)]
    given, key = read(found[-1]), f"recipe.args={found[-1]}"
    without = replaced(given, rest)
    lines = [(logging.INFO, f"{key}: a typed optimizer replaces {', '.join(sorted(without))}")] if without else []
    given = {name: value for name, value in given.items() if name not in without}
    translated = translate(given, key, count_ranks([*device_words(given), *rest]))
    if any(UNTYPED.match(word) for word in rest):  # the number of steps is the command's
        translated = [word for word in translated if not word.startswith("recipe.epochs=")]
    return [*translated, *rest], [*lines, *unused(given, key), *differences(given, key)]


def replaced(given: Mapping[str, Any], words: list[str]) -> set[str]:
    """Return the arguments that a typed `optimizer=NAME` replaces."""
    typed = [word.partition("=")[2] for word in words if word.startswith("optimizer=")]
    if not typed:
        return set()
    return given.keys() & ({"optim"} if typed[-1] in ("adamw", "adamw8bit") else {"optim", *OF_ADAM})


def count_ranks(words: list[str]) -> int:
    """Return the number of ranks that the arguments request, because transformers' batch size is per device."""
    typed = dict(word.lstrip("+").split("=", 1) for word in words if re.match(r"\+*trainer\.\w+=", word))
    devices = int(number) if (number := typed.get("trainer.devices", "")).isdecimal() else "auto"
    place = detect(dict(os.environ), devices)
    if place.launcher:
        return place.world
    if isinstance(devices, int):
        return devices
    if (accelerator := typed.get("trainer.accelerator", "auto")) == "cpu":
        return 1
    from trainer.comm.device import count_gpus  # imports torch

    return count_gpus(accelerator) or 1


def read(file: str) -> dict[str, Any]:
    """Read the file without nulls, which mean the default; only for clipping, null disables it."""
    try:
        found = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"recipe.args={file}: can't be read ({error}); give the JSON of TrainingArguments.to_json_string()"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"recipe.args={file}: is no JSON object; give the JSON of TrainingArguments.to_json_string()")
    return {name: value for name, value in found.items() if value is not None or name == "max_grad_norm"}


def translate(given: Mapping[str, Any], key: str, ranks: int) -> list[str]:
    """Translate to arguments of the command. One ConfigError names all that are wrong or that Echelon lacks."""
    if wrong := [*wrong_types(given)] or [*refusals(given)]:
        raise ConfigError(f"{key}: {'; and '.join(wrong)}")
    words = {SAME[name]: value for name, value in given.items() if name in SAME and value not in (None, "")}
    words |= batch_of(given, ranks) | epochs_of(given) | limits_of(given) | intervals_of(given)
    words |= {"trainer.precision": precision_of(given)}
    optimizer = OPTIMIZERS[str(given.get("optim") or "adamw_torch")]
    if optimizer == "sgd":  # torch's has no momentum, unless it is given
        words = {name: value for name, value in words.items() if name not in OF_ADAM.values()}
        words["optimizer.momentum"] = 0.0
    chosen = [] if optimizer == "adamw" else [f"optimizer={optimizer}"]  # the recipe has adamw
    chosen += [f"+callbacks=[{callback}]" for name, callback in CALLBACKS.items() if given.get(name)]
    return [*chosen, *device_words(given), *(f"{name}={shown(value)}" for name, value in words.items())]


def device_words(given: Mapping[str, Any]) -> list[str]:
    return ["trainer.accelerator=cpu"] if given.get("use_cpu") or given.get("no_cuda") else []


def wrong_types(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
        if name in NUMBERS and value is not None and not number:
            yield f"{name}={json.dumps(value)}: must be a number"
        if name in SWITCHES and not isinstance(value, bool):
            yield f"{name}={json.dumps(value)}: must be true or false"
        if name in OBJECTS and not isinstance(value, dict):
            yield f"{name}={json.dumps(value)}: must be an object; give that of the file"


def refusals(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield each argument that Echelon lacks, with what to do instead."""
    known = {*GIVEN, *WITHOUT_EFFECT, *OLD_GIVEN, *OLD_WITHOUT_EFFECT}
    others = {name: value for name, value in given.items() if name not in known and value not in ("", [], {})}
    defaults, elsewhere = default_values() if others else {}, OLD | SEQ2SEQ
    for name, value in others.items():
        if name not in REFUSED and name not in elsewhere:
            near = get_close_matches(name, [*GIVEN, *WITHOUT_EFFECT, *REFUSED], 3)
            fix = f"did you mean {' or '.join(near)}?" if near else "remove it"
            yield f"{name}: is no argument of transformers' TrainingArguments; {fix}"
        elif name in elsewhere and value not in OLD_DEFAULTS:
            yield f"{name}={shown(value)}: {elsewhere[name]}"
        elif name in REFUSED and value != defaults.get(name) and (value is not False or name in SWITCHED):
            yield f"{name}={shown(value)}: Echelon has no such setting; {REFUSED[name]}"
    yield from refused_values(given)


def unused(given: Mapping[str, Any], key: str) -> list[tuple[int, str]]:
    left = {name for name in given if name in {*WITHOUT_EFFECT, *OLD_WITHOUT_EFFECT} and given[name]}
    left |= switched_off(given) & given.keys()
    text = f"{key}: these name files, reports or evaluation, and change nothing here: {', '.join(sorted(left))}"
    return [(logging.INFO, text)] if left else []


def switched_off(given: Mapping[str, Any]) -> set[str]:
    """Return the arguments that have no effect given the others."""
    logs, saves = (given.get(name, "steps") == "steps" for name in ("logging_strategy", "save_strategy"))
    best = given.get("load_best_model_at_end")
    counts = {
        "logging_strategy": logs, "save_strategy": saves, "save_steps": saves,
        "eval_steps": given.get("eval_strategy") == "steps", "metric_for_best_model": best, "greater_is_better": best,
    }  # fmt: skip
    return {name for name, does in counts.items() if not does}


def differences(given: Mapping[str, Any], key: str) -> list[tuple[int, str]]:
    lines = []
    adam = OF_ADAM.keys() & given.keys()
    if adam and OPTIMIZERS.get(given.get("optim") or "") == "sgd":
        text = f"{key}: optim=sgd takes none of these, as in transformers: {', '.join(sorted(adam))}"
        lines.append((logging.INFO, text))
    if (steps := given.get("warmup_steps")) and given.get("warmup_ratio", steps) not in (0, steps):
        lines.append((logging.INFO, f"{key}: warmup_steps={steps} counts instead of warmup_ratio, as in transformers"))
    if given.get("save_total_limit") == 1:
        text = "2 checkpoints are kept, so that one is whole while the next is written"
        lines.append((logging.INFO, f"{key}: save_total_limit=1: {text}"))
    if given.get("load_best_model_at_end"):
        text = "export/ has the last weights; 'echelon export ckpt/best.pt FOLDER' writes the best"
        lines.append((logging.WARNING, f"{key}: load_best_model_at_end=true: {text}"))
    return lines


def refused_values(given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("logging_steps", "eval_steps", "save_steps"):
        if 0 < (given.get(name) or 0) < 1:
            yield f"{name}={given[name]}: is a part of the run; give a whole number of steps"
    if (optim := str(given.get("optim") or "adamw_torch")) not in OPTIMIZERS:
        fix = "; or type optimizer=adafactor" if optim == "adafactor" else ""
        yield f"optim={optim}: Echelon has no such optimizer; give {', '.join(OPTIMIZERS)}{fix}"
    if (shape := given.get("lr_scheduler_type")) in BY_METRIC:
        yield f"lr_scheduler_type={shape}: Echelon's rates depend on the step alone; give another, such as cosine"
    for name, known in CHOICES.items():
        if (value := given.get(name, known[0])) not in known and value not in BY_METRIC:
            yield f"{name}={shown(value)}: give {', '.join(known[:-1])} or {known[-1]}"
    if given.get("bf16") and given.get("fp16"):
        yield "bf16=true and fp16=true: a run has one precision, as in transformers; remove one"
    if given.get("average_tokens_across_devices") is False:
        yield "average_tokens_across_devices=false: Echelon counts the tokens of all ranks; remove it"
    if given.get("data_seed") not in (None, given.get("seed", 42)):
        yield f"data_seed={given['data_seed']}: the data has the seed of the run; remove it"
    yield from refused_parts(given)


def refused_parts(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.get("accelerator_config", {}).items():
        default, fix = PARTS.get(name, (None, "is no part of accelerator_config; remove it"))
        if fix and (name not in PARTS or value != default):
            yield f"accelerator_config.{name}={shown(value)}: {fix}"
    for name in OF_CHECKPOINTING:
        for key in given.get(name, {}).keys() - {"use_reentrant"}:
            yield f"{name}.{key}={shown(given[name][key])}: Echelon has no such setting; remove it"


def default_values() -> dict[str, Any]:
    import dataclasses

    from transformers import TrainingArguments

    return {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


def batch_of(given: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    micro, times = given.get("per_device_train_batch_size", 8), given.get("gradient_accumulation_steps", 1)
    return {"batch": micro * times * ranks, "micro_batch": micro, "accumulate": times}


def epochs_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of transformers' number of steps, which the recipe compares once it knows the data."""
    limited, drops = given.get("max_steps", -1) > 0, given.get("dataloader_drop_last", False)
    if limited and not drops:
        return {}
    epochs = None if limited else given.get("num_train_epochs", 3.0)
    parts = {"num_train_epochs": epochs, "dataloader_drop_last": drops}
    batch = batch_of(given, 1)
    return {"recipe.epochs": parts | {name: batch[name] for name in ("micro_batch", "accumulate")}}


def limits_of(given: Mapping[str, Any]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    if given.get("max_steps", -1) > 0:
        words |= {"trainer.max_steps": given["max_steps"], "trainer.max_epochs": None}
    if "max_grad_norm" in given:
        words["trainer.clip_norm"] = given["max_grad_norm"] or None
    if {"adam_beta1", "adam_beta2"} & given.keys():
        words["optimizer.betas"] = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    if given.get("full_determinism"):
        words["trainer.deterministic"] = True
    if given.get("warmup_ratio") and not given.get("warmup_steps"):  # as in transformers
        words["recipe.warmup_steps"] = given["warmup_ratio"]
    if given.get("lr_scheduler_kwargs"):
        words["recipe.lr_scheduler_kwargs"] = given["lr_scheduler_kwargs"]
    return words


def intervals_of(given: Mapping[str, Any]) -> dict[str, Any]:
    words: dict[str, Any] = {}
    if given.get("logging_steps", 0) >= 1:
        words["trainer.log_every_steps"] = int(given["logging_steps"])
    if given.get("eval_strategy") == "epoch":
        words["trainer.validate_every"] = "1 epochs"
    elif given.get("eval_strategy") == "steps":
        words["trainer.validate_every"] = int(given.get("eval_steps") or given.get("logging_steps") or 500)
    if given.get("save_strategy", "steps") == "steps" and given.get("save_steps", 0) >= 1:
        words["trainer.checkpoint.every_steps"] = int(given["save_steps"])
    if given.get("save_total_limit"):
        words["trainer.checkpoint.keep"] = max(2, given["save_total_limit"])
    if given.get("load_best_model_at_end"):
        metric = str(given.get("metric_for_best_model") or "loss").removeprefix("eval_")
        greater = given.get("greater_is_better")  # None: as transformers decides
        greater = not metric.endswith("loss") if greater is None else greater
        words["trainer.checkpoint.keep_best"] = f"{'max ' if greater else ''}val/{metric}"
    return words


def precision_of(given: Mapping[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16", "tf32") if given.get(name)), "fp32")


def shown(value: Any) -> str:
    """Format a value for Hydra."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{shown(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(shown, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value).replace("None", "null").lower()
    return f"'{value}'" if isinstance(value, str) and re.search(r"[^\w./-]", value) else str(value)
