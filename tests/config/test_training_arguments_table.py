"""Each field of the installed TrainingArguments is given, has no effect on numbers, or is refused by name."""

import dataclasses
import json

import pytest
from support.messages import refuses
from support.needs import needs

from trainer.config.training_arguments import BY_METRIC, CHOICES, PARTS, translate
from trainer.config.training_arguments_table import GIVEN, OLD, OLD_WITHOUT_EFFECT, REFUSED, WITHOUT_EFFECT
from trainer.errors import ConfigError

pytestmark = needs("transformers")
KEY = "recipe.args=x.json"


def test_each_field_of_the_installed_library_is_in_one_column():
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    columns = [*GIVEN, *WITHOUT_EFFECT, *REFUSED]
    assert fields - set(columns) == set(), "in no column"
    assert set(columns) - fields == set(), "not in the library"
    assert len(columns) == len(set(columns)), "in two columns"
    assert not fields & {*OLD, *OLD_WITHOUT_EFFECT}, "a name of old versions is in the library"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_value_other_than_the_default_is_refused_by_name(name):
    from transformers import TrainingArguments

    default = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}[name]
    with pytest.raises(ConfigError) as refused:
        translate({name: not default if isinstance(default, bool) else "own"}, KEY, 1)
    assert str(refused.value).startswith(f"{KEY}: {name}=") and str(refused.value).endswith(REFUSED[name])
    translate({name: default} if default is not None else {}, KEY, 1)


def test_a_file_of_the_class_for_generation_trains_unless_it_generates():
    from transformers import Seq2SeqTrainingArguments

    def given(**own: object) -> dict:
        made = Seq2SeqTrainingArguments(output_dir="out", report_to="none", use_cpu=True, **own)
        return {name: value for name, value in json.loads(made.to_json_string()).items() if value is not None}

    translate(given(), KEY, 1)
    with refuses("recipe.args=x.json", "predict_with_generate=true"):
        translate(given(predict_with_generate=True), KEY, 1)
    with pytest.raises(ConfigError, match=r": packing: is no argument of transformers' TrainingArguments; remove it$"):
        translate({"packing": True}, KEY, 1)


def enum_fields() -> dict[str, type]:
    """The fields that transformers' constructor makes members of an enum of."""
    from transformers import TrainingArguments
    from transformers.utils import ExplicitEnum

    made = TrainingArguments(output_dir="out", report_to="none", use_cpu=True)
    values = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return {name: type(value) for name, value in values.items() if isinstance(value, ExplicitEnum)}


def test_a_text_that_transformers_own_constructor_refuses_is_refused():
    """And each that it takes is taken, or refused by name."""
    from transformers import TrainingArguments

    assert enum_fields().keys() - {"optim"} == CHOICES.keys()
    for name, kind in enum_fields().items():
        with pytest.raises(ValueError, match="bset"):
            TrainingArguments(output_dir="out", report_to="none", use_cpu=True, **{name: "bset"})
        with pytest.raises(ConfigError, match=f"^recipe.args=x.json: {name}=bset: "):
            translate({name: "bset"}, KEY, 1)
        if name != "optim":
            assert {each.value for each in kind} - {*CHOICES[name]} <= {*BY_METRIC}, name
            for value in CHOICES[name]:
                translate({name: value}, KEY, 1)


def test_each_part_of_the_accelerators_config_is_known():
    from transformers.trainer_pt_utils import AcceleratorConfig

    defaults = {field.name: field.default for field in dataclasses.fields(AcceleratorConfig)}
    assert PARTS.keys() == defaults.keys()
    assert all(default == defaults[name] for name, (default, fix) in PARTS.items() if fix)
    translate({"accelerator_config": defaults | {"non_blocking": True}}, KEY, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ddp_broadcast_buffers": False}, "ddp_broadcast_buffers=false: Echelon has no such setting; "),
        ({"accelerator_config": {"dispatch_batches": True}}, r"accelerator_config\.dispatch_batches=true: each rank"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, r"accelerator_config\.use_seedable_sampler=false: "),
        ({"accelerator_config": {"split_batch": True}}, r"accelerator_config\.split_batch=true: is no part of acc"),
        ({"bf16": True, "fp16": True}, "bf16=true and fp16=true: a run has one precision"),
    ],
)
def test_a_value_that_would_change_the_run_is_refused(given, words):
    with pytest.raises(ConfigError, match=f"^recipe.args=x.json: {words}"):
        translate(given, KEY, 1)
