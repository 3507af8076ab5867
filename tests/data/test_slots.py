"""Batches go from workers to their rank in slots of memory: as they are, and for as long as they are kept."""

import errno
import gc
import multiprocessing
import os
import resource
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.loaders import small_loader, whole
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import default_collate
from toy_recipe import Toy

from trainer.data import slots as module
from trainer.data.device_prefetch import map_tensors
from trainer.data.slots import SMALLEST, Slots
from trainer.errors import ConfigError, UnavailableError, exhausted


class Pair(NamedTuple):
    x: Tensor
    name: str


class Worker:
    """The worker's side and the rank's in one process, each with maps of its own."""

    def __init__(self, each: int = 2, pinned: bool = False) -> None:
        self.rank = Slots(1, each, pinned)
        self.side = object.__new__(Slots)
        self.side.__dict__ = self.rank.__dict__ | {"maps": {}}
        self.side.begin_worker(0)

    def send(self, batch: Any) -> Any:
        return self.side.pack(batch, self.side.free())

    def sent(self, batch: Any) -> Any:
        return self.rank.take(self.send(batch))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.rank.close()


def where(tensor: Tensor, slots: Slots) -> int | None:
    """Return the slot that a tensor's memory is in."""
    for number, memory in slots.maps.items():
        start = np.frombuffer(memory, np.uint8).ctypes.data
        if start <= tensor.data_ptr() < start + len(memory):
            return number
    return None


SHAPES = {
    "dict": {"x": torch.rand(3, 4), "y": torch.arange(3)},
    "nested": [{"a": (torch.ones(2), [torch.zeros(1), "text", None, 1.5])}, Pair(torch.rand(2), "b"), b"bytes"],
    "ragged": [torch.rand(i, 2) for i in range(4)],
    "own": UserDict(x=torch.rand(2), rest=OrderedDict(y=torch.ones(1, dtype=torch.bool))),
    "array": {"a": np.arange(6).reshape(2, 3), "big": np.ones(50_000), "fortran": np.ones((3, 2), order="F")},
    "dtypes": [torch.ones(3).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)],
    "scalar": torch.tensor(3.5),
    "empty": {"none": torch.empty(0, 3), "x": torch.ones(1)},
    "strides": [torch.rand(4, 6).t(), torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.rand(9)[::2]],
    "expanded": torch.ones(3, 1).expand(3, 500),
    "special": [torch.full((2,), 1 + 2j).conj(), torch.eye(3).to_sparse(), torch.zeros(2).requires_grad_()],
    "packed": pack_sequence([torch.rand(3, 2), torch.rand(1, 2)]),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_of_any_structure_arrives_as_it_is(worker: Worker, name: str) -> None:
    batch = SHAPES[name]
    found = worker.sent(batch)
    assert repr(found).replace("+0.j", "-0.j") == repr(batch).replace("+0.j", "-0.j") and type(found) is type(batch)
    given, taken = list[Tensor](), list[Tensor]()
    if not isinstance(batch, PackedSequence):
        map_tensors(batch, given.append)
        map_tensors(found, taken.append)
    for one, other in zip(given, taken, strict=True):
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad and one.layout == other.layout
        if one.layout is torch.strided and not one.is_nested:
            assert one.shape == other.shape and one.stride() == other.stride()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_arrives_as_it_is(worker: Worker, layout: torch.layout) -> None:
    parts = [torch.ones(2), torch.zeros(3)]
    found = worker.sent([torch.nested.nested_tensor(parts, layout=layout)])[0]
    assert found.is_nested and found.layout == layout and all(map(torch.equal, found.unbind(), parts))


def test_a_tensor_that_was_shared_stays_shared(worker: Worker) -> None:
    shared = torch.zeros(2).share_memory_()
    found = worker.sent([shared])[0]
    shared += 1
    assert found.tolist() == [1.0, 1.0]


def test_tensors_are_in_the_slot_and_can_be_changed(worker: Worker) -> None:
    found = worker.sent({"x": torch.zeros(3, 4)})["x"]
    assert where(found, worker.rank) == 0
    found += 1
    assert found.sum() == 12


def test_tensors_that_share_memory_share_it_on_the_rank(worker: Worker) -> None:
    x = torch.arange(6.0)
    a, b, c = worker.sent([x, x[2:], torch.arange(6.0)])
    a[2] = 77
    assert b[0] == 77 and c[2] == 2


def test_a_small_part_of_a_large_tensor_is_not_sent_with_all_of_it(worker: Worker) -> None:
    """As torch does it: the storage goes in a file of its own, which is not copied."""
    large = torch.zeros(1 << 20)
    packed = worker.send([large[:4]])
    assert packed.stop < SMALLEST
    assert worker.rank.take(packed)[0].tolist() == [0.0] * 4


SAMPLES: list[tuple[list[Any], int]] = [
    ([torch.rand(3), torch.rand(3)], 24),
    ([{"x": torch.rand(2, 2), "n": 1, "s": "a"}, {"x": torch.rand(2, 2), "n": 2, "s": "b"}], 32),
    ([(np.float32(1.5), np.arange(3)), (np.float32(2.5), np.arange(3))], 48),
    ([Pair(torch.ones(2), "a"), Pair(torch.zeros(2), "b")], 16),
    ([torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)], 0),
]


@pytest.mark.parametrize(("samples", "size"), SAMPLES)
def test_collating_into_a_slot_gives_the_batch_of_default_collate(
    worker: Worker, samples: list[Any], size: int
) -> None:
    """Whose tensors are there without a copy, except those with a gradient."""
    expected, slot = default_collate(samples), worker.side.free()
    batch = map_tensors(slot.collate(samples), Tensor.detach)
    before = slot.used
    assert before == size
    found = worker.rank.take(worker.side.pack(batch, slot))
    assert repr(found) == repr(map_tensors(expected, Tensor.detach)) and type(found) is type(expected)
    tensors = list[Tensor]()
    map_tensors(found, tensors.append)
    if size:  # nothing was copied: only the pickled bytes came after the tensors
        assert all(where(tensor, worker.rank) == 0 for tensor in tensors)
        assert slot.used - before < 2000


def test_a_batch_may_be_kept_and_its_slot_is_used_again_once_it_is_dropped(worker: Worker) -> None:
    kept, last = worker.sent(torch.full((3,), 1.0)), worker.sent(torch.full((3,), 2.0))
    assert (where(kept, worker.rank), where(last, worker.rank)) == (0, 1)
    third = worker.send(torch.full((3,), 3.0))  # no slot is free: sent as torch sends it
    assert third.number == -1 and worker.rank.take(third).tolist() == [3.0] * 3
    part = last[1:]  # part of a batch keeps it
    del last
    assert worker.side.free() is None
    del part
    again = worker.sent(torch.full((3,), 4.0))
    assert where(again, worker.rank) == 1 and kept.tolist() == [1.0] * 3


def test_a_forked_process_that_drops_a_batch_frees_nothing(worker: Worker) -> None:
    """As data workers of a validation do, which are forked while the rank has a batch."""
    held = [worker.sent(torch.full((3,), 1.0))]
    child = multiprocessing.get_context("fork").Process(target=held.clear)
    child.start()
    child.join()
    assert child.exitcode == 0 and worker.side.free().number == 1 and held[0].tolist() == [1.0] * 3


def test_a_batch_without_tensors_frees_its_slot_at_once(worker: Worker) -> None:
    assert worker.sent(["a", b"b" * 1000, {"n": 1}]) == ["a", b"b" * 1000, {"n": 1}]
    assert worker.side.free().number == 0


def test_slots_grow_with_the_batches_and_old_batches_stay(worker: Worker) -> None:
    small = worker.sent(torch.full((10,), 1.0))
    worker.sent(torch.zeros(SMALLEST))  # slot 1
    large = worker.sent(torch.arange(3.0 * SMALLEST))  # slot 1 again
    del small
    again = worker.sent([torch.arange(SMALLEST), "text"])
    assert where(again[0], worker.rank) == 0 and torch.equal(again[0], torch.arange(SMALLEST))
    assert torch.equal(large, torch.arange(3.0 * SMALLEST))


def test_a_batch_that_grows_its_slot_while_it_is_collated_is_whole(worker: Worker) -> None:
    samples = [[torch.full((SMALLEST // 4,), float(i + 10 * j)) for j in range(5)] for i in range(3)]
    slot = worker.side.free()
    found = worker.rank.take(worker.side.pack(slot.collate(samples), slot))
    assert all(map(torch.equal, found, default_collate(samples)))


def test_a_batch_outlives_its_loader(worker: Worker) -> None:
    kept = worker.sent(torch.arange(5))
    worker.rank.close()
    gc.collect()
    assert kept.tolist() == [0, 1, 2, 3, 4]


def test_files_and_memory_are_given_back() -> None:
    before = len(os.listdir("/dev/fd"))
    made = Worker()
    assert made.sent(torch.ones(3)) is not None
    memory = weakref.ref(made.rank.mapped(0, SMALLEST))
    made.rank.close()
    del made
    gc.collect()
    assert len(os.listdir("/dev/fd")) == before and memory() is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_without_memory_for_a_slot_a_batch_is_sent_as_torch_sends_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    worker.sent(torch.ones(3))  # the slot has its first memory
    monkeypatch.setattr(os, "posix_fallocate", fail)
    x = torch.arange(float(SMALLEST))
    slot = worker.side.free()
    collated = slot.collate([x, x])
    packed = worker.side.pack(collated, slot)
    assert packed.number == -1 and torch.equal(worker.rank.take(packed), default_collate([x, x]))
    worker.sent([x, x])
    assert worker.side.free().number == 0  # the failed one was not marked as taken


@pytest.mark.parametrize(("limit", "each"), [(64, 2), (1 << 20, 100), (16, 0), (resource.RLIM_INFINITY, 100)])
def test_slots_leave_files_for_others(limit: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    slots = Slots(4, 100)
    assert slots.each == each and len(slots.files) == 4 * each
    slots.begin_worker(3)
    assert (slots.free() is None) == (each == 0)
    slots.close()


def test_a_full_shared_memory_is_named(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __reduce__(self) -> Any:
            raise RuntimeError(
                "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
            )

    with pytest.raises(UnavailableError, match=r"^/dev/shm: has no room"):
        worker.send(Full())


def test_too_few_files_for_a_batch_are_named(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by torch's DataLoader, whose queue would say it."""

    def receive(_: bytes) -> None:
        raise RuntimeError("received 0 items of ancdata")

    kept = [worker.sent(torch.ones(1)) for _ in range(2)]
    packed = worker.send(torch.ones(1))
    monkeypatch.setattr(module, "loads", receive)
    with pytest.raises(OSError) as caught:
        worker.rank.take(packed)
    assert "ulimit -n" in exhausted(caught.value) and len(kept) == 2


class Hides:
    """A batch of a class that copies its tensors itself, as torch's documentation shows."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.pinned = x, False

    def pin_memory(self) -> "Hides":
        self.pinned = True
        return self


def test_with_a_gpu_a_batch_that_copies_itself_is_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot could be filled again while the GPU still reads it."""
    pinned = list[int]()
    monkeypatch.setattr(module, "pin", lambda memory: pinned.append(len(memory)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    worker = Worker(pinned=True)
    seen, hidden = worker.sent([torch.ones(3)]), worker.sent(Hides(torch.ones(3)))
    assert where(seen[0], worker.rank) == 0 and pinned == [SMALLEST, SMALLEST]
    assert where(hidden.x, worker.rank) is None and hidden.pinned and hidden.x.tolist() == [1.0] * 3
    assert worker.side.free().number == 1  # it is free again
    worker.rank.close()


def test_memory_that_can_not_be_pinned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory (2)")

    monkeypatch.setattr(module, "pin", fail)
    worker = Worker(pinned=True)
    with pytest.raises(UnavailableError, match=r"^data\.workers: 65536 bytes can't be pinned \(.*\); raise ulimit -l"):
        worker.sent([torch.ones(3)])


def test_what_can_not_be_sent_is_named(worker: Worker) -> None:
    for batch, why in ((lambda: 1, "lambda"), (torch.ones(2, requires_grad=True) * 2, "has a graph: detach")):
        with pytest.raises(ConfigError, match=rf"^data\.workers: a worker can't send the batch \(.*{why}"):
            worker.send(batch)
    assert worker.side.free().number == 0


def test_a_worker_that_begins_again_has_all_its_slots(worker: Worker) -> None:
    worker.send(torch.ones(1))  # killed before the rank took it
    worker.side.begin_worker(0)
    assert worker.side.free().number == 0


def test_a_consumer_that_keeps_every_batch_gets_every_batch() -> None:
    """More than there are slots; and a slow one gets them in order."""
    loader = small_loader(Toy(), 0, 1, workers=2)
    try:
        steps = loader.train(0)
        kept = [whole(next(steps)).batches for _ in range(40)]
        expected = small_loader(Toy(), 0, 1, workers=0).train(0)
        for batches in kept:
            for found, other in zip(batches, whole(next(expected)).batches, strict=True):
                assert found.keys() == other.keys() and all(torch.equal(found[key], other[key]) for key in found)
    finally:
        loader.close()


def test_batches_go_through_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of `default_collate` without a copy, and none in a file of torch's."""
    taken = list[module.Packed]()

    def lay(self: module.Slot, storage: torch.UntypedStorage) -> int:
        start = storage.data_ptr() - np.frombuffer(self.memory, np.uint8).ctypes.data
        assert 0 <= start < len(self.memory), "is copied"
        return start

    monkeypatch.setattr(module.Slot, "lay", lay)
    take = Slots.take

    def note(self: Slots, packed: module.Packed) -> Any:
        taken.append(packed)
        return take(self, packed)

    monkeypatch.setattr(Slots, "take", note)
    loader = small_loader(Toy(), 0, 1, workers=1)
    try:
        steps = loader.train(0)
        for _ in range(30):
            next(steps)
    finally:
        loader.close()
    assert {packed.number for packed in taken} <= set(range(9)) and len(taken) >= 60
