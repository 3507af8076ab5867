"""Parts: slices that ranks wrote come back as any other rank asks for them, and what no run writes is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.states import bits, same
from torch import Tensor

from trainer.checkpoint import parts as module
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.parts import Stored, open_parts, part_section, read_all
from trainer.checkpoint.serialize import Part
from trainer.checkpoint.snapshot import Snapshot

GENERATOR = torch.Generator().manual_seed(0)
WHOLE = {
    "w": torch.randn(7, 3, generator=GENERATOR),
    "half": torch.randn(5, 2, 2, generator=GENERATOR).bfloat16(),
    "few": torch.randint(9, (2,), generator=GENERATOR),
    "none": torch.empty(0, 4),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
}


def slice_of(tensor: Tensor, rank: int, world: int, dimension: int = 0) -> Part:
    """As FSDP2 cuts: even chunks, the last ones smaller or empty."""
    length = tensor.shape[dimension]
    size = -(-length // world)
    start, stop = (min(i * size, length) for i in (rank, rank + 1))
    return Part(tensor.narrow(dimension, start, stop - start), tuple(tensor.shape), start, dimension)


def write(folder: Path, ranks: list[dict[str, Any]], state: dict[str, Any] | None = None) -> None:
    """What the ranks save, without a manifest."""
    folder.mkdir(exist_ok=True)
    files = dict(Snapshot().take({"model": {}, "optimizer": {}, "step": 3} if state is None else state))
    for rank, sections in enumerate(ranks):
        section = part_section(rank)
        files |= Snapshot().take({section: sections}, f"{section}.json")
    for name, content in files.items():
        (folder / name).write_bytes(content)


def sharded(world: int, last: bool = False) -> list[dict[str, Any]]:
    """`scalar` and what is no tensor are rank 0's. The rest is cut along the first or the last dimension."""
    common = {"scalar": WHOLE["scalar"], "note": [1, {"2": None}]}
    cut = [name for name in WHOLE if name != "scalar"]
    return [
        {
            "model": {name: slice_of(WHOLE[name], rank, world, (WHOLE[name].dim() - 1) * last) for name in cut}
            | ({} if rank else common)
        }
        for rank in range(world)
    ]


def opened(folder: Path, world: int) -> dict[str, Any]:
    return open_parts(folder, os.listdir(folder), world)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_slices_of_any_number_of_ranks_are_the_whole(tmp_path, world, last):
    write(tmp_path, sharded(world, last))
    found = opened(tmp_path, world)
    assert found["optimizer"] == {} and found["model"].pop("note") == [1, {"2": None}]
    whole = read_all(found["model"])
    assert whole.keys() == WHOLE.keys() and all(same(whole[name], WHOLE[name]) for name in WHOLE)


@given(st.integers(1, 5), st.booleans(), st.integers(1, 9), st.integers(0, 2))
def test_any_other_number_of_ranks_reads_its_slices_along_any_dimension(tmp_path_factory, wrote, last, reads, other):
    folder = tmp_path_factory.getbasetemp() / f"parts-{wrote}-{last}"
    write(folder, sharded(wrote, last))
    found = opened(folder, wrote)["model"]
    for name in ("w", "half", "few", "none"):
        for rank in range(reads):
            wanted = slice_of(WHOLE[name], rank, reads, other % WHOLE[name].dim())
            read = found[name].read(wanted.dimension, wanted.start, wanted.stop)
            assert read.shape == wanted.tensor.shape and bits(read) == bits(wanted.tensor)


def test_whole_tensors_of_one_rank_each(tmp_path):
    """As a rank that steps whole parameters saves them."""
    moments = {name: {"step": torch.tensor(4.0), "m": value} for name, value in WHOLE.items()}
    names = list(moments)
    write(tmp_path, [{"optimizer": {name: moments[name] for name in names[rank::2]}} for rank in range(2)])
    found = opened(tmp_path, 2)
    assert found["optimizer"].keys() == moments.keys()
    assert all(same(read_all(found["optimizer"][name]), moments[name]) for name in names)


def test_a_checkpoint_without_parts(tmp_path):
    tied = torch.ones(2, 2)
    state = {"model": {"a": tied, "b": tied}, "optimizer": {"a": {"m": (WHOLE["w"], 1)}}, "callbacks": {"x": tied}}
    write(tmp_path, [], state)
    found = opened(tmp_path, 4)
    assert found.keys() == {"model", "optimizer"}
    assert same(read_all(found["optimizer"]), {"a": {"m": (WHOLE["w"], 1)}})
    assert same(found["model"]["b"].read(0, 1, 2), torch.ones(1, 2))


@pytest.mark.parametrize(("last", "shapes"), [(False, [(1, 3), (1, 3)]), (True, [(2, 1)] * 3)])
def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch, last, shapes):
    write(tmp_path, sharded(4, last))
    read: list[tuple[int, ...]] = []
    real = module.Piece.read

    def noted(piece: module.Piece, *slices: module.Slice) -> Tensor:
        found = real(piece, *slices)
        read.append(tuple(found.shape))
        return found

    monkeypatch.setattr(module.Piece, "read", noted)
    # 4 ranks have rows 0-1, 2-3, 4-5, 6 of 7, or one column of 3, or none.
    found = opened(tmp_path, 4)["model"]["w"].read(0, 3, 5)
    assert bits(found) == bits(WHOLE["w"][3:5])
    assert read == shapes


def test_what_is_read_stays_when_the_file_is_cut(tmp_path):
    write(tmp_path, sharded(1))
    rows = opened(tmp_path, 1)["model"]["w"].read()
    (tmp_path / "part-00000.safetensors").write_bytes(b"")
    assert bits(rows) == bits(WHOLE["w"])


def missing_rank(ranks: list[dict[str, Any]]) -> None:
    del ranks[2]


def missing_slice(ranks: list[dict[str, Any]]) -> None:
    del ranks[1]["model"]["w"]


def missing_end(ranks: list[dict[str, Any]]) -> None:
    del ranks[2]["model"]["w"]


def slice_twice(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["w"] = Part(WHOLE["w"][2:6], (7, 3), 2)


def slice_moved(ranks: list[dict[str, Any]]) -> None:
    """One row is there twice, and another is missing."""
    ranks[1]["model"]["w"] = Part(WHOLE["w"][2:5], (7, 3), 2)


def a_whole_one_beside(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["w"] = WHOLE["w"]


def scalar_twice(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["scalar"] = WHOLE["scalar"]


def value_twice(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["note"] = [1, {"2": None}]


def other_shape(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["w"] = Part(WHOLE["w"][3:6], (8, 3), 3)


def other_dtype(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["w"] = Part(WHOLE["w"][3:6].double(), (7, 3), 3)


def wider(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["w"] = Part(torch.ones(3, 4), (7, 3), 3)


def past_the_end(ranks: list[dict[str, Any]]) -> None:
    ranks[2]["model"]["w"] = Part(WHOLE["w"][:3], (7, 3), 6)


def before_the_start(ranks: list[dict[str, Any]]) -> None:
    ranks[0]["model"]["w"] = Part(WHOLE["w"][:3], (7, 3), -1)


def other_dimension(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["model"]["w"] = slice_of(WHOLE["w"], 1, 3, 1)


def a_section_that_is_never_in_parts(ranks: list[dict[str, Any]]) -> None:
    ranks[1]["scaler"] = {"scale": 1.0}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (missing_rank, r"parts of 3 rank\(s\) are expected; it has part-00000.json, part-00001.json"),
        (missing_slice, "slices of model/w are missing or in two files"),
        (missing_end, "slices of model/w are missing or in two files"),
        (slice_moved, "slices of model/w are missing or in two files"),
        (slice_twice, "slices of model/w are missing or in two files"),
        (a_whole_one_beside, "slices of model/w are missing or in two files"),
        (scalar_twice, "slices of model/scalar are missing or in two files"),
        (value_twice, "model/note is in two files"),
        (other_shape, r"model/w is torch.float32 \(7, 3\) in one file, and torch.float32 \(8, 3\) in another"),
        (other_dtype, r"model/w is torch.float32 \(7, 3\) in one file, and torch.float64"),
        (other_dimension, "model/w is cut along dimension 0 in one file, and 1 in another"),
        (wider, r"model/w of \(3, 4\) from 3 on along dimension 0 is no part of \(7, 3\)"),
        (past_the_end, r"from 6 on along dimension 0 is no part of \(7, 3\)"),
        (before_the_start, r"from -1 on along dimension 0 is no part of \(7, 3\)"),
        (a_section_that_is_never_in_parts, r"\['scaler'\] can't be in parts"),
    ],
)
def test_files_that_are_not_those_of_one_run_are_refused(tmp_path, damage, why):
    ranks = sharded(3)
    damage(ranks)
    write(tmp_path, ranks)
    with pytest.raises(Damaged, match=rf"^{tmp_path}.*: can't be read as parts \(ValueError: .*{why}"):
        opened(tmp_path, 3)


def test_a_file_of_more_ranks_than_wrote_is_refused(tmp_path):
    write(tmp_path, sharded(3))
    with pytest.raises(Damaged, match=r"parts of 2 rank\(s\) are expected"):
        opened(tmp_path, 2)


@pytest.mark.parametrize("left_out", ["part-00001.json", "part-00001.safetensors", "state.json"])
def test_a_file_that_the_manifest_does_not_name_is_not_read(tmp_path, left_out):
    write(tmp_path, sharded(3))
    with pytest.raises(Damaged):
        open_parts(tmp_path, set(os.listdir(tmp_path)) - {left_out}, 3)


@pytest.mark.parametrize(
    "value",
    [
        {"$part": ["model/w", [7, 3]]},
        {"$part": ["model/w", [7, 3], "0"]},
        {"$part": ["model/w", 7, 0]},
        {"$part": ["model/other", [7, 3], 0]},
        {"$part": ["model/w", [7.0, 3], 0]},
        {"$part": ["model/w", [7, 3], False]},
        {"$part": [["model/w"], [7, 3], 0]},
        {"$part": ["model/scalar", [], 0]},
        {"$part": ["model/w", [7, 3], 0, 0]},
        {"$part": ["model/w", [7, 3], 0, 0, 6]},
        {"$part": ["model/w", [7, 3], 0, 0, None]},
        {"$part": ["model/w", [7, 3], 0, "0", 7]},
        {"$part": ["model/w", [7, 3], 0, 0, 7.0]},
        {"$part": ["model/w", [7, 3], 0.0, 0, 7]},
        {"$part": ["model/w", [7, 3], True, 0, 3]},
        {"$part": ["model/w", [7, 3], 1, 1, 4]},
        {"$part": ["model/w", [7, 3], 2, 0, 7]},
        {"$part": ["model/w", [7, 3], -2, 0, 7]},
        {"$part": ["model/w", [7, 3, 1], 0, 0, 7]},
        {"$tensor": {}},
        {"$tensor": "other"},
    ],
)
def test_json_that_no_run_writes_is_refused(tmp_path, value):
    write(tmp_path, sharded(1))
    path = tmp_path / "part-00000.json"
    content = json.loads(path.read_text())
    content["part-00000"]["model"]["w"] = value
    path.write_text(json.dumps(content))
    with pytest.raises(Damaged):
        opened(tmp_path, 1)
    path.write_text(json.dumps({"part-00001": content}))
    with pytest.raises(Damaged):
        opened(tmp_path, 1)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    write(tmp_path, sharded(1))
    os.rename(tmp_path / "part-00000.safetensors", tmp_path / "elsewhere")
    os.symlink("elsewhere", tmp_path / "part-00000.safetensors")
    with pytest.raises(Damaged, match="is a symbolic link"):
        opened(tmp_path, 1)


@pytest.mark.parametrize("value", [["model/w", [7, 3], 0], ["model/w", [7, 3], 0, 0, 7], ["model/w", [7, 3], 1, 0, 3]])
def test_the_json_of_a_part_before_and_since_format_4(tmp_path, value):
    write(tmp_path, sharded(1))
    path = tmp_path / "part-00000.json"
    content = json.loads(path.read_text())
    assert content["part-00000"]["model"]["w"] == {"$part": ["model/w", [7, 3], 0, 0, 7]}
    content["part-00000"]["model"]["w"] = {"$part": value}
    path.write_text(json.dumps(content))
    assert bits(opened(tmp_path, 1)["model"]["w"].read()) == bits(WHOLE["w"])


def test_slices_that_are_none_of_a_tensor_are_a_mistake_of_ours(tmp_path):
    write(tmp_path, sharded(1))
    stored = opened(tmp_path, 1)["model"]["w"]
    assert isinstance(stored, Stored)
    for start, stop in ((0, 8), (-1, 2), (3, 2)):
        with pytest.raises(AssertionError):
            stored.read(0, start, stop)


class Seen:
    """A piece of one row that counts how often it is compared."""

    looks = 0
    dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        Seen.looks += 1
        return (1, 3)


def test_slices_of_many_ranks_are_put_in_order_without_a_sort_for_each():
    """4,096 ranks, in an order that a sort does not know: a few comparisons for each row, and not thousands."""
    world, Seen.looks = 4096, 0
    stored = Stored((world, 3), torch.float32)
    for rank in range(world):
        stored.add(rank * 1237 % world, Seen())  # pyright: ignore[reportArgumentType]
    assert [start for start, _ in stored.pieces] == list(range(world))
    assert Seen.looks < 20 * world
