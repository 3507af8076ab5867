"""Predictions: what a recipe may return, what becomes of it over batches and ranks, and the two formats of files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.messages import refuses
from support.ranks import run_ranks

from trainer.comm.ranks import Ranks
from trainer.errors import ConfigError
from trainer.inference.predictions import Predictions, rows_of
from trainer.process.environment import Place


def gathered(place: Place, batches: list[list[tuple[list[int], Any]]]) -> dict[str, Any]:
    """`batches` has those of each rank: the numbers of the samples, and an output."""
    ranks = Ranks(place, "cpu", "gloo", 20.0)
    own = Predictions()
    for numbers, output in batches[ranks.rank]:
        own.add(numbers, list(map(str, numbers)), rows_of(output, len(numbers)))
    whole = own.gathered(ranks)
    ranks.leave()
    columns = {
        name: column.tolist() if isinstance(column, torch.Tensor) else column for name, column in whole.columns.items()
    }
    kinds = {name: type(column).__name__ for name, column in whole.columns.items()}
    return {"index": whole.index, "columns": columns, "kinds": kinds}


def test_rows_of_all_ranks_are_in_order_on_every_rank():
    """The last rank has no sample."""
    first = [([0, 1], torch.tensor([[0.0, 1.0], [2.0, 3.0]])), ([2], torch.tensor([[4.0, 5.0]]))]
    second = [([3], torch.tensor([[6.0, 7.0]]))]
    for found in run_ranks(3, gathered, [first, second, []]):
        assert found["index"] == [0, 1, 2, 3] and found["kinds"] == {"prediction": "Tensor"}
        assert found["columns"] == {"prediction": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]}


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.float64])
def test_each_dtype_travels(dtype):
    parts = [[([rank], torch.tensor([[rank, 1]]).to(dtype))] for rank in range(2)]
    for found in run_ranks(2, gathered, parts):
        assert found["columns"]["prediction"] == torch.tensor([[0, 1], [1, 1]]).to(dtype).tolist()


def test_rows_of_other_shapes_become_lists():
    """Texts of one rank are longer."""
    parts = [
        [([0], {"ids": torch.tensor([[1, 2]]), "text": ["a"]})],
        [([1], {"ids": torch.tensor([[1, 2, 3]]), "text": ["b"]})],
    ]
    for found in run_ranks(2, gathered, parts):
        assert found["columns"] == {"ids": [[1, 2], [1, 2, 3]], "text": ["a", "b"]}
        assert found["kinds"] == {"ids": "list", "text": "list"}


@pytest.mark.parametrize(
    "output, said",
    [
        (torch.tensor(1.0), r"returned a tensor of shape \(\) as 'prediction'; return a tensor \(samples, \.\.\.\)"),
        (torch.zeros(3), r"returned 3 rows as 'prediction' for 2 samples; return one each"),
        ({"a": None}, r"returned None as 'a'; return"),
        ({"index": [1, 2]}, r"returned the name 'index'; give another text"),
        ("ab", r"returned a value of type str as 'prediction'"),
        ([{1}, {2}], r"'prediction' has a row that JSON lacks \(a value of type set\); return tensors, numbers, texts"),
        (
            {"a": [b"x", b"y"]},
            r"'a' has a row that JSON lacks \(a value of type bytes\); return tensors, numbers, texts",
        ),
        ([[0], {(0, 1): 2}], r"'prediction' has a row that JSON lacks \(keys must be str, .*, not tuple\); return"),
        ([torch.tensor(1j)] * 2, r"'prediction' has a row that JSON lacks \(a value of type complex\); return"),
        ([np.longdouble(1)] * 2, r"'prediction' has a row that JSON lacks \(.*\); return"),
        ((torch.zeros(2, 3), torch.zeros(2)), r"returned a tuple of tensors as 'prediction'; return .* \{'logits': "),
        ({"hidden": (torch.zeros(2, 3),) * 3}, r"returned a tuple of tensors as 'hidden'; return several outputs by"),
    ],
)
def test_other_outputs_are_refused(output, said):
    with pytest.raises(ConfigError, match=rf"^recipe\.predict\(\): {said}"):
        rows_of(output, 2)


@pytest.mark.parametrize(
    "output, rows",
    [
        (list(np.array([3, 4])), [3, 4]),
        ([np.float32(0.5), np.bool_(True)], [0.5, True]),
        ([np.array([[1, 2]]), torch.tensor([3])], [[[1, 2]], [3]]),
        ([{"boxes": torch.ones(1, 2), "score": np.float64(0.5)}, {}], [{"boxes": [[1.0, 1.0]], "score": 0.5}, {}]),
        (torch.tensor([1, 2]).unbind(), [1, 2]),
        ([torch.tensor([1]), torch.tensor([2, 3])], [[1], [2, 3]]),
    ],
)
def test_rows_of_a_list_are_plain_values(output, rows):
    (found,) = rows_of(output, 2).values()
    assert found == rows and json.dumps(found) == json.dumps(rows)


def test_batches_of_other_names_are_refused():
    own = Predictions()
    own.add([0], ["0"], rows_of({"a": [1]}, 1))
    with refuses("recipe.predict()", "returned", "return", "batch"):
        own.add([1], ["1"], rows_of({"b": [1]}, 1))


def whole(output: Any, keys: list[str]) -> Predictions:
    own = Predictions()
    own.add([0, 1], keys, rows_of(output, 2))
    return own.gathered(Ranks(Place(), "cpu", "gloo", 20.0))


def test_lines_of_json(tmp_path: Path):
    whole({"p": torch.tensor([[0.5], [1.0]]), "name": ["a", "b"]}, ["0", "cat"]).write(tmp_path / "deep" / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "deep" / "out.jsonl").read_text().splitlines()]
    assert lines == [{"index": 0, "p": [0.5], "name": "a"}, {"index": 1, "key": "cat", "p": [1.0], "name": "b"}]


def test_a_number_that_is_not_finite_is_null_in_json(tmp_path: Path):
    nan, inf = float("nan"), float("inf")
    whole({"p": torch.tensor([[nan, -inf], [1.0, 2.0]]), "q": [[{"a": inf}], nan]}, ["0", "1"]).write(
        file := tmp_path / "out.jsonl"
    )
    assert [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()] == [
        {"index": 0, "p": [None, None], "q": [{"a": None}]},
        {"index": 1, "p": [1.0, 2.0], "q": None},
    ]


def test_complex_tensors_go_into_safetensors_alone(tmp_path: Path):
    found = whole(torch.tensor([1j, 2.0]), ["0", "1"])
    found.write(tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")["prediction"].tolist() == [1j, 2.0]
    with pytest.raises(ConfigError, match=r"out\.jsonl: predictions are complex numbers, which JSON lacks; give a "):
        found.write(tmp_path / "out.jsonl")


def test_tensors(tmp_path: Path):
    file = tmp_path / "out.safetensors"
    whole(torch.tensor([[0.5], [1.0]]), ["0", "1"]).write(file)
    found = load_file(file)
    assert found["index"].tolist() == [0, 1] and found["prediction"].tolist() == [[0.5], [1.0]]
    with pytest.raises(ConfigError, match=r"out\.safetensors: 'prediction' is no tensor .*; give a \.jsonl file$"):
        whole(["a", "b"], ["0", "1"]).write(file)
    with pytest.raises(ConfigError, match=r"out\.pt: predictions are written as \.jsonl or \.safetensors; give a file"):
        whole(["a", "b"], ["0", "1"]).write(tmp_path / "out.pt")
