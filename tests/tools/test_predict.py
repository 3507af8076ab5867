"""`predict` of checkpoints: one row for each sample, in the data's order, on any number of ranks."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cli import Result, run
from support.stored import TRUSTED, train

from trainer.errors import ConfigError
from trainer.tools import predict as tool

PREDICT = "trainer.tools.predict"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    train(folder)
    return folder


def predict(cwd: Path, *arguments: str) -> Result:
    return run([*arguments, TRUSTED], cwd, PREDICT)


@pytest.mark.parametrize("devices", [1, 3])
def test_rows_are_in_the_order_of_the_data(trained, tmp_path, devices):
    file = tmp_path / "deep" / "out.jsonl"
    done = predict(trained, "runs/r", "--output", str(file), "--devices", str(devices))
    assert done.code == 0 and done.out.endswith(f"13 predictions of val -> {file}\n"), done.err
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(13))
    other = tmp_path / "out.safetensors"
    assert predict(trained, "ckpt/last.pt", "--output", str(other), "--devices", "1").code == 0
    found = load_file(other)
    assert found["index"].tolist() == list(range(13)) and found["prediction"].dtype == torch.float64
    assert torch.allclose(
        found["prediction"], torch.tensor([line["prediction"] for line in lines], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("file", "said"),
    [("new/deep/a.jsonl", "CHECKPOINT=nowhere: "), ("a.jsonl", r"--output=a\.jsonl: is a folder; name a file")],
)
def test_a_refusal_comes_before_the_work_and_leaves_no_folder(tmp_path, file, said):
    Path("a.jsonl").mkdir()
    given = Namespace(checkpoint="nowhere", changes=[], split="val", devices="1", micro_batch=None, output=Path(file))
    with pytest.raises(ConfigError, match=f"^{said}"):
        tool.predict(given)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ["--output", "out.pt"],
            r"out\.pt: predictions are written as \.jsonl or \.safetensors; give a file of",
        ),
        (["--output", "/proc/x/out.jsonl"], r"--output=/proc/x: can't be written: .*; give another folder"),
        (["--output", "out.jsonl", "recipe._target_=toy_recipe.Toy"], r"recipe: Toy has no method 'predict'; define"),
    ],
)
def test_mistakes_are_one_line(trained, arguments, said):
    done = predict(trained, "runs/r", "--devices", "1", *arguments)
    assert done.code == 78 and done.err.count("\n") == 1
    assert re.match(f"echelon: {said}", done.err), done.err
