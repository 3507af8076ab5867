"""What is saved comes back bit for bit, and training goes on as if nothing had happened."""

import copy
import json
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.messages import refuses
from support.optimizers import OPTIMIZERS, built, goes_on, train
from support.states import loaded_from, same, save_state, through
from torch import Tensor, nn
from torch.optim import ASGD, SGD

from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.safetensors_buffer import DTYPES
from trainer.checkpoint.serialize import load_optimizer_state, optimizer_state
from trainer.optim.partial_step import OptimizerProxy


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits: NaN payloads and subnormals too. A bool has 0 and 1 only."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, size), dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1)


TENSORS = st.builds(random, st.sampled_from(sorted(DTYPES, key=str)), st.integers(0, 3), st.integers(0, 3))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"))
KEYS = st.integers(-2, 2) | st.sampled_from(
    ["$tensor", "$dict", "$", "a", "a/b", "b", "", "__metadata__", "0", "\u00e9"]
)
VALUES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(st.sampled_from(["model", "callbacks", "step", "state"]), VALUES, max_size=3))
def test_any_state_comes_back(tmp_path: Path, state: dict[str, Any]) -> None:
    assert same(state, through(tmp_path, state))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_dtype_and_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    base = random(dtype, 6, 4)
    tensors = {
        "whole": base,
        "transposed": base.t(),
        "strided": base[::2, 1],
        "part": base[1:3],
        "overlapping": base[2:4],
        "expanded": base[:1].expand(3, 4),
        "flat": base.view(-1),
        "square": base[:4],
        "turned": base[:4].t(),
        "scalar": base[0, 0],
        "empty": base[:0],
        "no columns": torch.empty(3, 0, dtype=dtype),
        "alone": random(dtype),
    }
    assert same(tensors, through(tmp_path, {"s": tensors})["s"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def test_a_model_file_is_readable_by_others(tmp_path: Path) -> None:
    model, folder = Tied(), tmp_path / "staging"
    folder.mkdir()
    state = model.state_dict()
    save_state(folder, {"model": state, "step": 3})
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == state.keys() - {"head.weight"}  # tied: stored once
    assert all(torch.equal(stored[name], state[name]) for name in stored)
    loaded = loaded_from(folder)
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"] and loaded["step"] == 3
    fresh = Tied()
    fresh.load_state_dict(loaded["model"])
    assert same(dict(state), dict(fresh.state_dict()))


def test_names_that_collide(tmp_path: Path) -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    state = {"a/b": a, "a": {"b": b, "b_": c}, "__metadata__": a + 1, 1: b + 1, "1": c + 1}
    assert same(state, through(tmp_path, {"s": state})["s"])


def test_the_same_memory_as_another_dtype_is_no_tie(tmp_path: Path) -> None:
    x = torch.ones(3)
    state = {"x": x, "bits": x.view(torch.int32), "row": x.view(1, 3)}
    assert same(state, through(tmp_path, {"s": state})["s"])


def test_ties_end_with_a_section_and_are_never_invented(tmp_path: Path) -> None:
    weight = torch.ones(3)
    empty = [torch.empty(0), torch.empty(0)]
    loaded = through(tmp_path, {"model": {"w": weight}, "callbacks": {"ema": weight, "e": empty, "z": weight.view(3)}})
    assert loaded["model"]["w"] is not loaded["callbacks"]["ema"]
    assert loaded["callbacks"]["ema"] is loaded["callbacks"]["z"]
    assert loaded["callbacks"]["e"][0] is not loaded["callbacks"]["e"][1]


def test_a_loaded_state_needs_its_files_no_more(tmp_path: Path) -> None:
    save_state(tmp_path, {"s": {"t": torch.ones(5000)}})
    loaded = loaded_from(tmp_path)
    (tmp_path / "s.safetensors").write_bytes(b"")  # a mapped file would end the process here
    assert loaded["s"]["t"].sum() == 5000
    loaded["s"]["t"].add_(1)


def test_where_tensors_lie_in_a_file(tmp_path: Path) -> None:
    state = {"exp_avg": torch.ones(1), "steps": [torch.ones(2), {"7": torch.ones(3)}]}
    save_state(tmp_path, {"optimizer": {"layer.weight": state}, "seed": torch.ones(4)})
    names = {"layer.weight/exp_avg": 1, "layer.weight/steps/0": 2, "layer.weight/steps/1/7": 3}
    assert {name: len(t) for name, t in load_file(tmp_path / "optimizer.safetensors").items()} == names
    assert load_file(tmp_path / "seed.safetensors").keys() == {"seed"}


class Odd(Tensor):
    pass


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (np.float64(1), "float64"),
        (np.zeros(2), "ndarray"),
        (Colour.RED, "Colour"),
        (Point(1), "Point"),
        (torch.Size([1]), "Size"),
        (torch.float32, "dtype"),
        ({1.5: 0}, "key"),
        ({True: 0}, "key"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2).as_subclass(Odd), "Odd"),
        (torch.ones(2, device="meta"), "can't be saved"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2, dtype=torch.complex64).conj(), "complex64"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"callbacks/ema/2/x.*{kind}"):
        save_state(tmp_path, {"callbacks": {"ema": [1, 2, {"x": value}]}})


def test_dicts_of_other_kinds_become_dicts(tmp_path: Path) -> None:
    assert same({"s": {"b": 1, "a": 2}}, through(tmp_path, {"s": OrderedDict(b=1, a=2)}))


NOT_OURS = ["NaN", '{"$new": 1}', '{"$tensor": "none"}', '{"$tensor": []}', '{"$tuple": 1}', '{"$float": "1"}']
NOT_OURS += ['{"$dict": [[1]]}', '{"$dict": [[[], 1]]}', "[" * 100_000, "", "1}, {"]


@pytest.mark.parametrize(
    "content",
    ["[]", "", "\x00", '{"../s": 1}', *(f'{{"s": {value}}}' for value in NOT_OURS)],
    ids=lambda content: content[:20],
)
def test_a_state_that_was_not_written_here(tmp_path: Path, content: str) -> None:
    save_state(tmp_path, {"s": {"t": torch.ones(2)}})
    assert loaded_from(tmp_path)["s"]["t"].tolist() == [1, 1]
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(Damaged, match=r"state\.json"):
        loaded_from(tmp_path)


def test_damaged_tensor_files_and_huge_states(tmp_path: Path) -> None:
    save_state(tmp_path, {"s": {"t": torch.ones(2)}})
    path = tmp_path / "s.safetensors"
    content = path.read_bytes()
    for wrong in (b"", content[:-1], content[:20], b"\xff" * 100):
        path.write_bytes(wrong)
        with pytest.raises(Damaged):
            loaded_from(tmp_path)
    path.write_bytes(content)
    with open(tmp_path / "state.json", "ab") as file:
        file.truncate(257 << 20)
    with pytest.raises(Damaged, match="larger"):
        loaded_from(tmp_path)


# Optimizers: training with a save and a restart in the middle against training without.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("sgd-fused", torch.bfloat16):
        pytest.skip("torch 2.13 doesn't update such parameters on a CPU (pytorch#191763)")
    goes_on(tmp_path, name, dtype, "cpu")


@pytest.mark.parametrize(
    ("kind", "key", "flag", "device", "dtype"),
    [
        (SGD, "step", None, "cpu", torch.float64),
        (SGD, "mu_product", None, "cpu", torch.float64),
        (SGD, "step", "fused", "meta", torch.float32),
        (SGD, "step", "capturable", "meta", torch.float32),
        (SGD, "mu_product", "capturable", "meta", torch.float64),
        (ASGD, "step", None, "meta", torch.float32),
        (ASGD, "eta", None, "meta", torch.float64),
        (lambda groups: OptimizerProxy(ASGD(groups), lambda: None), "mu", None, "meta", torch.float64),
    ],
)
def test_scalars_of_an_optimizer_are_where_it_makes_them(kind, key, flag, device, dtype) -> None:
    """NAdam would wait for the device once a parameter."""
    net = nn.Linear(2, 2, bias=False, device="meta")
    optimizer = kind([{"params": net.parameters(), **({flag: True} if flag else {})}])
    saved = {"weight": {key: torch.tensor(0.5, dtype=torch.float64), "exp_avg": torch.ones(2, 2)}}
    load_optimizer_state(optimizer, net, saved)
    state = optimizer.state[net.weight]
    assert (state[key].device.type, state[key].dtype) == (device, dtype)
    assert state["exp_avg"].device.type == "meta"


def test_optimizer_state_is_by_name(tmp_path: Path) -> None:
    net, optimizer = built("adamw", "cpu", torch.float32)
    train(net, optimizer, range(1))
    state = optimizer_state(optimizer, net)
    names = ["conv.weight", "conv.bias", "mid.weight", "mid.bias", "again.bias", "unused.weight", "unused.bias"]
    assert list(state) == names and state["unused.weight"] == {}
    assert state["conv.weight"]["exp_avg"] is optimizer.state[net.conv.weight]["exp_avg"]
    assert set(state["conv.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert json.loads(json.dumps(list(state))) == names


def test_what_was_saved_before_the_first_step_clears() -> None:
    net, optimizer = built("adamw", "cpu", torch.float32)
    before = optimizer_state(optimizer, net)
    train(net, optimizer, range(1))
    load_optimizer_state(optimizer, net, before)
    assert optimizer_state(optimizer, net) == before == {name: {} for name in before}


def test_another_models_optimizer_state_is_refused() -> None:
    net, optimizer = built("adamw", "cpu", torch.float32)
    train(net, optimizer, range(2))
    before = copy.deepcopy(optimizer_state(optimizer, net))
    state = dict(before)
    state["gone.weight"] = state.pop("mid.bias")
    with refuses("trainer.resume", "mid.bias", "gone.weight", "trainer.init_from"):
        load_optimizer_state(optimizer, net, state)
    with refuses("trainer.resume", "again.bias", "conv.bias", "conv.weight", "trainer.init_from"):
        load_optimizer_state(optimizer, net, {})
    assert same(before, optimizer_state(optimizer, net))


def test_an_optimizer_of_something_else_is_refused() -> None:
    net, _ = built("adamw", "cpu", torch.float32)
    with refuses("optimizer", "1", "p.data.copy_(other)"):
        optimizer_state(SGD([nn.Parameter(torch.ones(1))], lr=1), net)


def test_a_state_of_another_shape_is_named():
    net = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer_state(optimizer, net))
    saved["weight"]["exp_avg_sq"] = torch.zeros(3)
    with refuses("trainer.resume", "exp_avg_sq", "trainer.init_from"):
        load_optimizer_state(optimizer, net, saved)
