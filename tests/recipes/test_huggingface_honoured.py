"""Rates, steps and refusals of a file of TrainingArguments, compared with transformers' own."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.huggingface import load, write_llama
from support.messages import refuses
from support.needs import needs

from recipes.huggingface import HuggingFace
from recipes.huggingface.schedule import BY_METRIC, TransformersSchedule
from trainer.config.options import DataOptions, Options
from trainer.config.training_arguments import expand, translate
from trainer.errors import ConfigError
from trainer.optim.factories import adamw
from trainer.trainer import Trainer

pytestmark = needs("transformers")
KEY = "recipe.args=x.json"
KWARGS = {
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4, "min_lr_ratio": 0.1},
    "polynomial": {"lr_end": 1e-6, "power": 2.0},
    "cosine_with_restarts": {"num_cycles": 2},
}


def test_the_file_that_transformers_writes_of_its_defaults_is_taken(tmp_path):
    from transformers import TrainingArguments

    (tmp_path / "a.json").write_text(TrainingArguments(str(tmp_path), use_cpu=True).to_json_string())
    words, _ = expand([f"recipe.args={tmp_path}/a.json", "trainer.devices=1"])
    assert "optimizer.lr=5e-05" in words and "batch=8" in words


def test_all_refused_arguments_are_in_one_line_with_their_new_names():
    given = {
        "evaluation_strategy": "steps", "learning_rat": 0.1, "label_smoothing_factor": 0.1, "optim": "adafactor",
        "lr_scheduler_type": "greedy", "group_by_length": True, "past_index": -1, "remove_unused_columns": False,
        "include_num_input_tokens_seen": False, "gradient_checkpointing_kwargs": {"use_reentrant": False, "own": 1},
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        translate(given, KEY, 1)
    parts = str(refused.value).removeprefix(f"{KEY}: ").split("; and ")
    assert [part.split(":")[0] for part in parts] == [
        "evaluation_strategy=steps", "learning_rat", "label_smoothing_factor=0.1", "group_by_length=true",
        "remove_unused_columns=false", "optim=adafactor", "lr_scheduler_type=greedy",
        "gradient_checkpointing_kwargs.own=1",
    ]  # fmt: skip
    assert parts[0].endswith("is eval_strategy now") and "did you mean learning_rate" in parts[1]
    assert "\n" not in str(refused.value)
    with refuses("recipe.args=x.json", 'bf16="no"', 'learning_rate="1e-3"'):
        translate({"bf16": "no", "learning_rate": "1e-3"}, KEY, 1)


def names_of_schedules() -> list[str]:
    from transformers.trainer_utils import SchedulerType

    return [each.value for each in SchedulerType]


def test_rates_of_each_schedule_are_transformers_or_it_is_refused():
    from transformers.optimization import get_scheduler

    peak, steps, warmup = 5e-5, 12, 3
    for name in names_of_schedules():
        if name in BY_METRIC:
            with pytest.raises(ConfigError, match=f"^recipe.lr_scheduler_type={name}: follows"):
                TransformersSchedule(lr_scheduler_type=name)
            with pytest.raises(ConfigError, match=f"lr_scheduler_type={name}: Echelon's rates depend on the step"):
                translate({"lr_scheduler_type": name}, KEY, 1)
            continue
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
        vars(optimizer)["_opt_called"] = True
        theirs: Any = get_scheduler(name, optimizer, warmup, steps, KWARGS.get(name))
        shape = TransformersSchedule(
            lr_scheduler_type=name, lr_scheduler_kwargs=KWARGS.get(name, {}), warmup_steps=warmup
        )
        rate, group = shape.resolve(steps, 8, None), {"lr": peak}
        for step in range(steps):
            rate.put(step, [group], [peak])
            assert group["lr"] == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-20), (name, step)
            theirs.step()


def test_a_floor_above_the_learning_rate_is_refused():
    shape = TransformersSchedule(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 0.1})
    with refuses("recipe.lr_scheduler_type=polynomial", "lr_end", "0.1"):
        shape.resolve(4, 8, None).put(0, [{"lr": 0.01}], [0.01])


def steps_of_transformers(folder: Path, given: dict[str, Any]) -> int:
    from transformers import Trainer as TheirTrainer
    from transformers import TrainingArguments

    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, report_to=[], **given)
    samples: Any = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    theirs = TheirTrainer(load(folder), arguments, train_dataset=samples)
    return theirs.set_initial_training_values(arguments, theirs.get_train_dataloader())[-1]


def steps_here(folder: Path, given: dict[str, Any]) -> int:
    words = translate(given, KEY, 1)
    values = dict(word.split("=", 1) for word in words if "=" in word)
    text = values.get("recipe.epochs")
    epochs = None
    if text:
        pairs = dict(pair.split(":") for pair in text.strip("{}").split(","))
        epochs = {name: json.loads(value) for name, value in pairs.items()}
    recipe = HuggingFace(str(folder / "llama"), str(folder / "lines.jsonl"), epochs=epochs)
    limits: dict[str, Any] = {"max_steps": int(n)} if (n := values.get("trainer.max_steps")) else {"max_epochs": 3.0}
    if (shown := values.get("trainer.max_epochs", "null")) != "null":
        limits["max_epochs"] = float(shown)
    trainer = Trainer(
        recipe, {}, adamw, recipe.schedule, batch=int(values["batch"]), accumulate=int(values["accumulate"]),
        options=Options(**limits, run_dir=str(folder / "run"), accelerator="cpu"), data=DataOptions(workers=0),
    )  # fmt: skip
    assert trainer.plan.max_steps is not None
    return trainer.plan.max_steps


def test_steps_are_transformers_or_refused_with_their_number(tmp_path):
    """Of 40 samples: whole and short batches, accumulation, parts of epochs, dropped samples."""
    pytest.importorskip("accelerate", reason="needs accelerate, as transformers' Trainer does: the extra [test]")
    write_llama(tmp_path)
    refused = 0
    for batch, accumulate, epochs, more in [
        (8, 1, 3, {}), (5, 2, 3, {}), (5, 3, 3, {}), (7, 1, 1, {}), (7, 1, 3, {}), (4, 4, 1.5, {}), (20, 1, 0.7, {}),
        (8, 1, 2, {"dataloader_drop_last": True}), (7, 1, 1, {"dataloader_drop_last": True}),
        (7, 1, 1, {"dataloader_drop_last": True, "max_steps": 5}), (7, 1, 1, {"max_steps": 9}),
        (7, 1, 1, {"dataloader_drop_last": True, "max_steps": 6}), (5, 3, 3, {"dataloader_drop_last": True}),
    ]:  # fmt: skip
        given = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate} | more
        given |= {"num_train_epochs": epochs}
        theirs = steps_of_transformers(tmp_path, given)
        try:
            assert steps_here(tmp_path, given) == theirs, given
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error) and "give " in str(error)
            whole = math.ceil(epochs * 40 / (batch * accumulate))
            drops = "dataloader_drop_last=true: transformers" in str(error)
            assert drops or (whole != theirs and f"give max_steps={theirs}," in str(error)), given
    assert refused == 5


def test_typed_steps_win(tmp_path):
    (tmp_path / "a.json").write_text('{"per_device_train_batch_size": 5}')
    for typed, counts in (("trainer.max_steps=4", False), ("batch=8", False), ("trainer.seed=3", True)):
        words, _ = expand([f"recipe.args={tmp_path}/a.json", "trainer.devices=1", typed])
        assert any(word.startswith("recipe.epochs=") for word in words) == counts, typed
