"""Each field of the installed TrainingArguments is given, has no effect on numbers, or is refused by name."""

import dataclasses
import json

import pytest
from support.needs import needs

from trainer.config.training_arguments import translate
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
    with pytest.raises(ConfigError, match=r"^recipe\.args=x\.json: predict_with_generate=true: a validation computes "):
        translate(given(predict_with_generate=True), KEY, 1)
    with pytest.raises(ConfigError, match=r": packing: is no argument of transformers' TrainingArguments; remove it$"):
        translate({"packing": True}, KEY, 1)
