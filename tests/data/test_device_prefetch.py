"""Micro-batches on their way to the device: each is copied while the one before is computed, and none is kept.

Batches of any kind arrive whole. Another device stands for CUDA's.
"""

import contextlib
import weakref
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainer.data import device_prefetch
from trainer.data.device_prefetch import Upload, map_tensors, upload


class Micro(NamedTuple):
    batch: str | None
    weight: int


class Copied(device_prefetch.Upload):
    """Notes when a copy begins, and when it is waited for."""

    events: list[str] = []

    def begin(self) -> None:
        self.events.append(f"begin {self.batch}")

    def wait(self) -> str:
        self.events.append(f"wait {self.batch}")
        return self.batch


def test_the_next_copy_begins_before_a_batch_is_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And after the one given out is there: a copy that is waited for waits for all that has begun."""
    monkeypatch.setattr(device_prefetch, "Upload", Copied)
    monkeypatch.setattr(Copied, "events", [])
    stream: object = object()  # stands for CUDA's
    for batch, weight in upload(iter([Micro("a", 1), Micro("b", 2), Micro("c", 3)]), stream):  # pyright: ignore
        Copied.events.append(f"use {batch} {weight}")
    assert Copied.events == [
        "begin a", "wait a", "begin b", "use a 1", "wait b", "begin c", "use b 2", "wait c", "use c 3"
    ]  # fmt: skip


def test_without_a_stream_batches_stay_as_they_are() -> None:
    micros = [Micro("a", 1), Micro("b", 2)]
    given = upload(iter(micros), None)
    assert next(given) is micros[0] and list(given) == micros[1:]


def test_mappings_keep_their_class_and_the_original_its_tensors():
    batch = UserDict(x=torch.zeros(2), rest=({"y": torch.ones(3)}, "name"))
    doubled = map_tensors(batch, lambda tensor: tensor + 1)
    assert type(doubled) is UserDict
    assert doubled["x"].tolist() == [1, 1] and doubled["rest"][0]["y"].tolist() == [2, 2, 2]
    assert doubled["rest"][1] == "name"
    assert batch["x"].tolist() == [0, 0] and batch["rest"][0]["y"].tolist() == [1, 1, 1]


class Stream:
    """Notes for whom it waits."""

    def __init__(self, name: str, device: str, waits: list[str]) -> None:
        self.name, self.device, self.waits = name, device, waits

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(f"{self.name} for {other.name}")

    def record_event(self) -> "Event":
        return Event()


class Event:
    """The end of a copy."""

    over = True

    def query(self) -> bool:
        return self.over


@pytest.fixture(params=["cpu", "meta"])
def stream(request, monkeypatch) -> Stream:
    """The stream of uploads to a device; on the CPU contents can be compared, on `meta` places."""
    waits: list[str] = []
    compute = Stream("compute", request.param, waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # needs a GPU
    return Stream("upload", request.param, waits)


def uploaded(batch: Any, stream: Any) -> Any:
    upload = Upload(batch, stream)
    upload.wait()
    return upload.take()


def arrived(tensor: Tensor, values: list[float], stream: Stream) -> bool:
    return tensor.device.type == stream.device and (tensor.is_meta or tensor.flatten().tolist() == values)


def packed() -> PackedSequence:
    return pack_sequence([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], enforce_sorted=False)


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    label: str
    half: Any = field(init=False, default=None)


@dataclass
class Batch:
    x: Any
    rest: Any


class Tagged(dict):
    tag = ""


class Moved:
    """Lightning's protocol: a `to` that takes a device alone, and returns the object."""

    def __init__(self) -> None:
        self.hidden = torch.ones(1)

    def to(self, device: str) -> "Moved":
        self.hidden = self.hidden.to(device)
        return self


class Pinned(Moved):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def pin_memory(self) -> "Pinned":
        self.calls = [*self.calls, "pin_memory"]
        return self

    def to(self, device: str, non_blocking: bool = False) -> "Moved":
        self.calls = [*self.calls, f"to, {non_blocking=}"]
        return super().to(device)


def test_a_packed_sequence_arrives_in_any_container_and_its_batch_sizes_stay_on_the_host(stream):
    batch = {"x": Pair(packed(), (torch.zeros(2),)), "y": [packed()]}
    moved = uploaded(batch, stream)
    for one in (moved["x"].x, moved["y"][0]):
        assert type(one) is PackedSequence and arrived(one.data, [2.0, 1.0, 3.0], stream)
        assert one.batch_sizes.tolist() == [2, 1]
        assert arrived(one.sorted_indices, [1, 0], stream) and arrived(one.unsorted_indices, [1, 0], stream)
    assert type(moved["x"]) is Pair and arrived(moved["x"].y[0], [0.0, 0.0], stream)


def test_dataclasses_arrive_with_all_of_their_fields(stream):
    frozen = Frozen(torch.ones(2), "name")
    object.__setattr__(frozen, "half", torch.zeros(1))
    batch = Batch(frozen, {"y": Pair(torch.ones(1), None)})
    moved = uploaded(batch, stream)
    assert type(moved) is Batch and type(moved.x) is Frozen and moved.x.label == "name" and moved.rest["y"].y is None
    assert arrived(moved.x.x, [1.0, 1.0], stream) and arrived(moved.x.half, [0.0], stream)
    assert arrived(moved.rest["y"].x, [1.0], stream)
    assert batch.x is frozen and frozen.x.device.type == "cpu"  # the original is as it was


def test_mappings_arrive_in_their_class_with_their_state(stream):
    tagged = Tagged(x=torch.ones(1))
    tagged.tag = "kept"
    counted = defaultdict(list, x=[torch.ones(1)])
    mappings = [tagged, counted, OrderedDict(x=torch.ones(1)), UserDict(x=torch.ones(1))]
    for mapping in [*mappings, MappingProxyType({"x": torch.ones(1)})]:
        (moved,) = uploaded([mapping], stream)
        assert type(moved) is type(mapping)
        assert arrived(moved["x"][0], [1.0], stream) and mapping["x"][0].device.type == "cpu"
    (moved_tagged, moved_counted, *_) = uploaded(mappings, stream)
    assert moved_tagged.tag == "kept" and moved_counted["new"] == [] and "new" not in counted


@pytest.mark.parametrize("kind", [Moved, Pinned])
def test_an_object_with_a_method_to_is_moved_by_it(kind, stream):
    batch = kind()
    (moved,) = uploaded((batch,), stream)
    assert type(moved) is kind and arrived(moved.hidden, [1.0], stream)
    assert batch.hidden.device.type == "cpu" and getattr(batch, "calls", []) == []
    assert getattr(moved, "calls", ["pin_memory", "to, non_blocking=True"]) == ["pin_memory", "to, non_blocking=True"]


def test_all_else_stays_as_it_is(stream):
    batch = ["text", 1, None, b"bytes", range(3), {1, 2}, Batch]
    assert uploaded(batch, stream) == batch


def test_a_copy_waits_for_the_work_before_it_and_work_for_the_copy(stream):
    """The copy may get memory of a batch with which the device still computes."""
    upload: Any = Upload(torch.zeros(1), stream)  # pyright: ignore[reportArgumentType]
    upload.begin()
    assert stream.waits == ["upload for compute"]
    upload.wait()
    assert stream.waits == ["upload for compute", "compute for upload"]


def test_a_batch_is_kept_until_its_copy_is_over(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is a data worker's slot, which is filled again once nothing refers to the batch."""
    device_prefetch.COPIED.clear()
    monkeypatch.setattr(Event, "over", False)
    batches = [torch.full((2,), float(i)) for i in range(3)]
    kept = [weakref.ref(batch) for batch in batches]
    while batches:
        uploaded(batches.pop(0), stream)
    assert all(ref() is not None for ref in kept)
    monkeypatch.setattr(Event, "over", True)
    uploaded(torch.zeros(1), stream)
    assert all(ref() is None for ref in kept)
    device_prefetch.COPIED.clear()
