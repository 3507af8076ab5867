"""What a notebook shows of a Trainer, its summary and predictions; and their forms in one line."""

import json
import pickle
import re

import torch
import yaml
from support.runs import make

from trainer.inference.predictions import Predictions, rows_of
from trainer.inference.shown import Summary, short


def text_of(html: str) -> list[list[str]]:
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_a_trainer_says_what_it_trains(tmp_path):
    trainer = make(max_steps=4)
    assert repr(trainer) == f"Trainer(run_dir={trainer.run_dir!r}, batch={trainer.batch}, step=0, world=1)"
    facts = dict(text_of(trainer._repr_html_()))
    assert facts["recipe"] == "Toy" and facts["step"] == "0 of 4" and "best" not in facts
    assert facts["folder"] == str(trainer.run_dir) and facts["callbacks"] == "none"
    assert repr(trainer.strategy) == "SingleDevice(data_rank=0, data_world=1, whole=True)"
    assert repr(trainer.ranks) == "Ranks(rank=0, world=1, device=device(type='cpu'), backend='gloo')"
    assert repr(trainer.precision) == "Precision(name='fp32', label='fp32', master_weights=True)"
    summary = trainer.fit()
    assert json.loads(json.dumps(summary)) == summary
    assert yaml.safe_load(yaml.safe_dump(Summary({"steps": 4}))) == {"steps": 4}
    assert type(pickle.loads(pickle.dumps(summary))) is dict
    facts = dict(text_of(trainer._repr_html_()))
    assert facts["step"] == "4 of 4" and facts["checkpoint"] == summary["checkpoint"]
    rows = dict(text_of(summary._repr_html_()))
    assert rows["steps"] == "4" and rows["stopped"] == "max_steps" and "versions" not in rows


def test_a_summary_of_odd_values():
    rows = dict(text_of(Summary({"best": {"value": 0.123456, "at": None}, "none": None, "x<y": 3})._repr_html_()))
    assert rows == {"best": "value 0.1235, at ", "none": "", "x&lt;y": "3"}


def test_the_first_rows_of_predictions():
    predictions = Predictions()
    output = {"y": torch.arange(12.0), "wide": torch.ones(12, 20), "text": ["<b>"] * 12}
    predictions.add(list(range(12)), list(map(str, range(12))), rows_of(output, 12))
    predictions.columns = output
    heads, *rows = text_of(predictions._repr_html_())
    assert heads == ["sample", "y", "wide", "text"] and len(rows) == 10
    assert rows[3] == ["3", "3", ", ".join(["1"] * 8) + ", ...", "&lt;b&gt;"]
    assert predictions._repr_html_().startswith("<p>12 samples</p>")
    assert short("x" * 100) == "x" * 77 + "..." and short(0.123456) == "0.1235" and short([1, 2]) == "[1, 2]"
