"""Initial weights from elsewhere: what torch.save and Hugging Face write, as usually wrapped; refusals in a line."""

import json
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import refuses
from support.quick import quick
from support.runs import make
from torch import Tensor, nn

from trainer.checkpoint.pretrained import BIN_INDEX, INDEX, load_weights, weights_files
from trainer.errors import ConfigError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def model(seed: int) -> Tied:
    torch.manual_seed(seed)
    made = Tied()
    for buffer in (made.norm.running_mean, made.norm.running_var):
        assert buffer is not None
        buffer.uniform_()
    return made


@pytest.fixture
def state() -> dict[str, Tensor]:
    return model(1).state_dict()


def taken(path: Path) -> dict[str, Tensor]:
    other = model(2)
    load_weights(other, str(path))
    assert other.head.weight is other.embed.weight
    return other.state_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "epoch": 3},
        lambda state: {"state_dict": prefixed(state, "model."), "hyper_parameters": {"width": 3}},
        lambda state: {"state_dict": prefixed(state, "net.encoder.") | {"loss.weight": torch.ones(2)}},
        lambda state: prefixed(state, "module."),
        lambda state: {"model_state_dict": prefixed(state, "module._orig_mod.")},
        lambda state: prefixed(state, "_orig_mod.module."),
        lambda state: {name: value for name, value in state.items() if name != "embed.weight"},
        lambda state: {name: nn.Parameter(v) if v.is_floating_point() else v for name, v in state.items()},
    ],
    ids=[
        "bare",
        "model",
        "lightning",
        "an attribute of it",
        "ddp",
        "compiled",
        "compiled around ddp",
        "tied once",
        "parameters",
    ],
)
def test_files_of_torch(tmp_path: Path, state: dict[str, Tensor], name: str, wrap: Any) -> None:
    torch.save(wrap(state), tmp_path / name)
    assert same(taken(tmp_path / name), state)


def test_two_models_in_a_file_are_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    """A teacher and a student, for example: nobody knows which is meant."""
    torch.save(prefixed(state, "teacher.") | prefixed(state, "student."), tmp_path / "a.ckpt")
    with refuses("trainer.init_from", "embed.weight", "teacher.embed.weight"):
        taken(tmp_path / "a.ckpt")


def test_the_older_format_of_torch(tmp_path: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert same(taken(tmp_path / "a.pt"), state)


def test_a_model_that_has_a_module_keeps_its_names(tmp_path: Path) -> None:
    saved, module = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    load_weights(module, str(tmp_path / "a.pt"))
    assert same(module.state_dict(), saved.state_dict())


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", INDEX, BIN_INDEX])
def test_folders_of_hugging_face(tmp_path: Path, state: dict[str, Tensor], file: str) -> None:
    """One of two tied weights is there, as `save_pretrained` leaves it."""
    (tmp_path / "config.json").write_text("{}")
    once = {name: value for name, value in state.items() if name != "head.weight"}
    if file in (INDEX, BIN_INDEX):
        suffix, save = ("safetensors", save_file) if file == INDEX else ("bin", torch.save)
        parts = {f"model-00001-of-00002.{suffix}": ["embed.weight"]}
        parts[f"model-00002-of-00002.{suffix}"] = [name for name in once if name != "embed.weight"]
        for part, names in parts.items():
            save({name: once[name] for name in names}, tmp_path / part)
        found = {name: part for part, names in parts.items() for name in names}
        (tmp_path / file).write_text(json.dumps({"metadata": {}, "weight_map": found}))
    elif file.endswith(".bin"):
        torch.save(once, tmp_path / file)
    else:
        save_file(once, tmp_path / file)
    assert same(taken(tmp_path), state)


@pytest.mark.parametrize("size", quick(["20KB", "5GB"]))
def test_what_transformers_saves(tmp_path: Path, size: str) -> None:
    """In one file, and in several with an index."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    saved, other = transformers.BertForMaskedLM(config), transformers.BertForMaskedLM(config)
    saved.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).exists() is (size == "20KB")
    load_weights(other, str(tmp_path))
    assert same(other.state_dict(), saved.state_dict())


def test_what_differs_is_told_and_nothing_is_taken(tmp_path: Path, state: dict[str, Tensor]) -> None:
    odd = {name: value for name, value in state.items() if not name.startswith("norm.running")}
    torch.save({**odd, "norm.weight": torch.zeros(4), "extra": torch.zeros(1)}, tmp_path / "a.pt")
    other, before = model(2), model(2).state_dict()
    with pytest.raises(ConfigError) as error:
        load_weights(other, str(tmp_path / "a.pt"))
    assert str(error.value) == (
        f"trainer.init_from={tmp_path}/a.pt: 2 weights are missing, 1 are unknown, 1 have another shape or dtype "
        "(norm.running_mean, norm.running_var, extra, norm.weight (4,) instead of (3,), ...); "
        "give weights of this model"
    )
    assert same(other.state_dict(), before)


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("norm.weight", torch.Tensor.bool, "(3,) bool instead of (3,)"),
        ("norm.weight", torch.Tensor.char, "(3,) int8 instead of (3,)"),
        ("norm.weight", lambda value: value.to(torch.complex64), "(3,) complex64 instead of (3,)"),
        ("norm.weight", torch.Tensor.to_sparse, "(3,) sparse_coo instead of (3,)"),
        ("norm.weight", lambda value: value.to("meta"), "(3,) on meta instead of (3,)"),
        ("norm.num_batches_tracked", torch.Tensor.float, "() instead of () int64"),
    ],
)
def test_another_kind_of_number_is_not_made_the_models(
    tmp_path: Path, state: dict[str, Tensor], name: str, kind: Any, told: str
) -> None:
    torch.save({**state, name: kind(state[name])}, tmp_path / "a.pt")
    other, before = model(2), model(2).state_dict()
    with pytest.raises(ConfigError, match=rf"1 have another shape or dtype \({re.escape(f'{name} {told}')}, "):
        load_weights(other, str(tmp_path / "a.pt"))
    assert same(other.state_dict(), before)


def test_floats_of_another_size_are(tmp_path: Path, state: dict[str, Tensor]) -> None:
    half = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    torch.save(half, tmp_path / "a.pt")
    assert same(taken(tmp_path / "a.pt"), {name: value.to(state[name].dtype) for name, value in half.items()})


def write(path: Path, content: Any) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.pt", nn.Linear(2, 2), "asks for torch.nn.modules.linear.Linear, which is not a weight"),
        ("a.pt", {"weight": torch.zeros(1), "lr": 0.1}, "is not a dict of tensors by name"),
        ("a.pt", [torch.zeros(1)], "is not a dict of tensors by name"),
        ("a.pt", b"", "is empty, and is no file of torch.save"),
        ("a.pt", b"time,loss\n1,2\n", "is text that begins with 'time,loss', and is no file of torch.save"),
        ("a.pt", b"\x1f\x8b\x08\x00", "begins with the bytes 1f8b0800, and is no file of torch.save"),
        ("a.safetensors", b"time,loss\n1,2\n", "is text that begins with 'time,loss', and is no file of safetensors"),
        ("a.pt", b"PK\x03\x04 cut", ""),
        ("a.safetensors", b"garbage", ""),
    ],
)
def test_what_can_not_be_read(tmp_path: Path, name: str, content: Any, said: str) -> None:
    write(tmp_path / name, content)
    path = re.escape(str(tmp_path / name))
    with pytest.raises(
        ConfigError, match=rf"^trainer\.init_from={path}: {path}: {said}.*; give a whole checkpoint, or a file"
    ) as error:
        load_weights(nn.Linear(1, 1), str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"a": "../a.safetensors"}}', "'../a.safetensors' is not the name of a file in this folder"),
        ('{"weight_map": {"a": "/a.safetensors"}}', "'/a.safetensors' is not the name of a file in this folder"),
        ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing, which"),
        ('{"weight_map": {"a": "a.bin", "a": "b.bin"}}', "a key occurs twice"),
        ('{"weight_map": {"a": 1}}', "not an index"),
        ('{"weight_map": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "not an index"),
        ("{}", "not an index"),
        ("", "not an index"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: str, said: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    (folder / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=f"^trainer.init_from=.*{said}.*; download it again") as error:
        weights_files(str(folder))
    assert "\n" not in str(error.value)


def test_a_torn_checkpoint_is_no_folder_of_hugging_face(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_file({name: value for name, value in state.items() if name != "head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"MANIFEST\.json: is missing; give a whole checkpoint"):
        taken(tmp_path)


def test_a_file_that_unpacks_to_far_more_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """As torch.save makes none."""
    torch.save({"weight": torch.zeros(1 << 20), "bias": torch.zeros(2)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(ConfigError, match=r"bomb\.pt: is compressed"):
        load_weights(torch.nn.Linear(3, 2), str(tmp_path / "bomb.pt"))
    with refuses("trainer.init_from", "(1048576,)", "(2, 3)"):
        load_weights(torch.nn.Linear(3, 2), str(tmp_path / "plain.pt"))


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "older"])
def test_a_pickle_that_asks_for_memory_is_refused(tmp_path: Path, archive: bool, state: dict[str, Tensor]) -> None:
    """A few hundred bytes would take a GiB, or any number."""
    path, asks = tmp_path / "a.pt", b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x40\x00\x85R."
    torch.save(state, path, _use_new_zipfile_serialization=archive)
    if archive:
        with zipfile.ZipFile(path) as plain:
            entries = {entry.filename: plain.read(entry) for entry in plain.infolist()}
        with zipfile.ZipFile(path, "w") as bomb:
            for name, content in entries.items():
                bomb.writestr(name, asks if name.endswith("data.pkl") else content)
    else:
        path.write_bytes(path.read_bytes().replace(b"}q", asks, 1))
    with refuses("trainer.init_from", "bytearray"):
        load_weights(nn.Linear(3, 2), str(path))


def test_far_more_names_than_the_model_has_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """A million names took a minute."""
    entries = (f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000))
    header = f"{{{','.join(entries)}}}".encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"a\.safetensors: its header has \S+ bytes, and at most 4,196,352 fit"):
        load_weights(nn.Linear(3, 2), str(tmp_path / "a.safetensors"))
    assert time.process_time() - began < 5


def test_init_from_takes_weights_and_nothing_else(tmp_path: Path) -> None:
    first = make()
    first.fit()
    second = make(run_dir="runs/s", init_from="ckpt/last.pt", max_steps=0)
    second.fit()
    assert (second.step, second.samples) == (0, 0)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    tensors = load_file("ckpt/r/step-00000004/model.safetensors")
    save_file({**tensors, "more": torch.zeros(1)}, "more.safetensors")
    with refuses("trainer.init_from=more.safetensors", "0 weights", "1 are unknown", "more"):
        make(run_dir="runs/t", init_from="more.safetensors").fit()
    Path("more.safetensors").write_bytes(b"torn")
    with refuses("trainer.init_from=more.safetensors", "whole"):
        make(run_dir="runs/t", init_from="more.safetensors").fit()
    with refuses("trainer.init_from=nowhere", "such"):
        make(run_dir="runs/u", init_from="nowhere").fit()


def test_init_from_refuses_a_damaged_checkpoint(tmp_path: Path) -> None:
    make().fit()
    file = Path("ckpt/r/step-00000004/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with refuses("trainer.init_from=ckpt/last.pt", "sha256"):
        make(run_dir="runs/s", init_from="ckpt/last.pt").fit()
