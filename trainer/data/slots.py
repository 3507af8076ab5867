"""Memory in which data workers lay batches for their rank. Neither side copies, opens or maps anything per batch.

torch sends each tensor in a file of its own in /dev/shm, which both processes map, and whose pages the kernel clears. A
slot is a file without a name that both keep mapped. It is used again once the rank has dropped the batch.
"""

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from trainer.comm.device import pin
from trainer.data.device_prefetch import map_tensors
from trainer.errors import NO_SHARED_MEMORY, ConfigError, UnavailableError, lacks_shared_memory
from trainer.process.environment import raise_file_limit

ALIGNED = 64  # bytes: what vector instructions like, and each dtype
SMALLEST = 1 << 16  # bytes of a slot
PROTOCOL = 5  # of pickle: large bytes and arrays are written without a copy
SHARE = 8  # slots take at most 1 / 8 of the files that may be open; a mapped one takes two
SPARE = 2.0  # bytes of a storage for each byte of a tensor up to which the whole storage is sent

loads: Any = ForkingPickler.loads  # pyright: ignore[reportAttributeAccessIssue] it takes pickle's function for a method
_opened = threading.local()  # the bytes of the batch that this thread is taking


class Packed(NamedTuple):
    """A batch as pickled bytes, in a slot with its tensors, or here."""

    number: int  # of the slot; -1: none was free
    size: int  # of the slot's file
    start: int  # of the pickled bytes
    stop: int
    pickled: bytes = b""


class Slots:
    """The slots of a loader's workers. They have to be made before the workers are forked.

    A worker marks a slot as taken when it sends a batch. The rank marks it as free when nothing refers to the batch any
    more: it may be kept for any time. If none is free, a batch is sent as torch sends it.

    Args:
        each: Slots of a worker; fewer if only few files may be open.
        pinned: Lock the memory for copies to a GPU.
    """

    def __init__(self, workers: int, each: int, pinned: bool = False) -> None:
        self.each, self.pinned = min(each, raise_file_limit() // (SHARE * workers)), pinned
        self.maps: dict[int, mmap.mmap] = {}  # of this process
        self.pins: list[Tensor] = []  # each map, for as long as it is pinned
        self.taken = mmap.mmap(-1, max(1, workers * self.each))  # a byte for each slot
        self.files: list[int] = []
        try:
            while len(self.files) < workers * self.each:
                self.files.append(os.memfd_create("echelon-batch"))
        except OSError:  # the system has no more files
            self.close()
            self.each = 0
        self.own = 0, 0  # this worker's slots

    def pack(self, batch: Any, slot: "Slot | None") -> Packed:
        """Lay a batch into a slot, or pickle it as torch does. Objects that are no tensors are pickled in any case.

        Raises:
            ConfigError: The batch can't be pickled.
            UnavailableError: /dev/shm has no room.
        """
        try:
            if slot is not None:
                with suppress(OSError):  # no memory, or a limit of a file's size: torch's way has its own errors
                    return self._laid(batch, slot)
            SendingPickler(chunks := Chunks(), PROTOCOL).dump(batch)
            return Packed(-1, 0, 0, 0, b"".join(chunks.parts))
        except MemoryError:
            raise
        except Exception as error:  # of any class, because the objects' own code runs
            if lacks_shared_memory(error):
                raise UnavailableError(NO_SHARED_MEMORY) from None
            raise ConfigError(
                f"data.workers: a worker can't send the batch ({type(error).__name__}: {error}); let transform() or "
                "collate() return tensors, numbers and strings, or give data.workers=0"
            ) from None

    def _laid(self, batch: Any, slot: "Slot") -> Packed:
        LayingPickler(chunks := Chunks(), slot).dump(batch)
        start = stop = slot.reserve(sum(map(len, chunks.parts)))
        for part in chunks.parts:
            slot.memory[stop : stop + len(part)] = part
            stop += len(part)
        self.taken[slot.number] = 1
        return Packed(slot.number, len(slot.memory), start, stop)

    def begin_worker(self, worker: int) -> None:
        """Free the slots of a worker. One that was killed as it started may have taken some."""
        first, self.pinned = worker * self.each, False  # a forked process has no GPU
        self.own = first, first + self.each
        self.taken[first : first + self.each] = bytes(self.each)

    def free(self) -> "Slot | None":
        """Return an unused slot of this worker. The first is most likely in the processor's cache."""
        number = self.taken.find(b"\0", *self.own)
        return None if number < 0 else Slot(self, number)

    def take(self, packed: Packed) -> Any:
        """Return the batch on the rank, with its tensors in the slot.

        With a GPU, a class whose tensors `Upload` can't see copies them itself. Its batch is a copy, pinned by the
        class, because nobody knows when its own copy to the GPU is over.
        """
        if packed.number < 0:
            batch = received(packed.pickled)
            return pin_memory(batch) if self.pinned else batch
        held = np.frombuffer(self.mapped(packed.number, packed.size), np.uint8)
        weakref.finalize(held, self._free, packed.number, os.getpid()).atexit = False
        batch, storages = opened(held, packed)
        if self.pinned and storages > len(visible(batch)):
            return pin_memory(opened(held.copy(), packed)[0])
        return batch

    def _free(self, number: int, rank: int) -> None:
        if os.getpid() == rank:  # in a process that the rank has forked, the rank's batches may be dropped, too
            self.taken[number] = 0

    def mapped(self, number: int, size: int) -> mmap.mmap:
        """Return this process's map of a slot, whose file has grown to `size` bytes."""
        kept = self.maps.get(number)
        if kept is None or len(kept) < size:
            kept = self.maps[number] = mmap.mmap(self.files[number], size)
            if self.pinned:
                self.pins.append(torch.frombuffer(kept, dtype=torch.uint8))
                try:
                    pin(self.pins[-1])
                except RuntimeError as error:
                    fix = "raise ulimit -l and the memory of the control group, or give data.workers=0"
                    raise UnavailableError(f"data.workers: {size} bytes can't be pinned ({error}); {fix}") from None
        return kept

    def close(self) -> None:
        """Close the files on the rank. Batches that are still held stay valid."""
        if self.pins:
            torch.cuda.synchronize()
            self.pins.clear()
        self.maps.clear()
        while self.files:
            os.close(self.files.pop())


class Slot:
    """A slot that a worker fills."""

    def __init__(self, slots: Slots, number: int) -> None:
        self.slots, self.number, self.used = slots, number, 0
        self.memory = slots.maps.get(number) or self._grown(SMALLEST)

    def reserve(self, size: int) -> int:
        """Return the first of `size` unused bytes.

        Raises:
            OSError: The system gives no memory.
        """
        start = -(-self.used // ALIGNED) * ALIGNED
        if start + size > len(self.memory):
            self.memory = self._grown(start + size)
        self.used = start + size
        return start

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in the slot, or elsewhere if the slot can't grow."""
        count = int(np.prod(shape, dtype=np.int64))
        if count:
            with suppress(OSError):
                start = self.reserve(count * dtype.itemsize)
                return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start).view(tuple(shape))
        return torch.empty(tuple(shape), dtype=dtype)

    def collate(self, samples: list[Any]) -> Any:
        """Return the batch of `default_collate`, with its tensors in the slot."""
        into: Any = default_collate_fn_map | {Tensor: self._stack}
        return collate(samples, collate_fn_map=into)

    def _stack(self, tensors: Sequence[Tensor], *, collate_fn_map: Any) -> Tensor:
        first = tensors[0]
        if type(first) is not Tensor or not is_plain(first):
            return default_collate_fn_map[Tensor](tensors, collate_fn_map=collate_fn_map)
        return torch.stack(tuple(tensors), out=self.empty((len(tensors), *first.shape), first.dtype))

    def lay(self, storage: torch.UntypedStorage) -> int:
        """Return the place of a storage in the slot, where it is copied unless it is there."""
        memory = np.frombuffer(self.memory, np.uint8)
        if 0 <= (start := storage.data_ptr() - memory.ctypes.data) < len(self.memory):
            return start
        start = self.reserve(storage.nbytes())
        target = torch.frombuffer(self.memory, dtype=torch.uint8, count=storage.nbytes(), offset=start)
        target.untyped_storage().copy_(storage)
        return start

    def _grown(self, size: int) -> mmap.mmap:
        size = max(size, len(self.slots.maps.get(self.number, b"")) * 3 // 2)  # few maps, since the rank keeps each
        size = -(-size // SMALLEST) * SMALLEST
        os.posix_fallocate(self.slots.files[self.number], 0, size)  # else a lack of memory would be a bus error
        return self.slots.mapped(self.number, size)


class Chunks:
    """A file that keeps what is written to it in parts, large values without a copy."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def write(self, part: Any) -> None:
        self.parts.append(part if isinstance(part, bytes) else memoryview(part).cast("B"))


class SendingPickler(ForkingPickler):
    """Pickles a batch as torch's queue would, and refuses a tensor with a graph."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            if obj.requires_grad and not obj.is_leaf:
                raise TypeError("a tensor has a graph: detach() it")
            if obj.layout is torch.strided and (obj.is_conj() or obj.is_neg()):  # torch would send other values
                return identity, (obj.resolve_conj().resolve_neg(),)
        return NotImplemented


class LayingPickler(SendingPickler):
    """Lays the storages of plain tensors into a slot, each once, so that tensors that share one still do."""

    def __init__(self, file: Chunks, slot: Slot) -> None:
        super().__init__(file, PROTOCOL)
        self.slot = slot
        self.places: dict[int, tuple[int | None, Any]] = {}  # None: torch sends it. With the storage, so that it stays

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not is_plain(obj):
            return super().reducer_override(obj)
        storage = obj.untyped_storage()
        if (key := storage._cdata) not in self.places:
            fits = 0 < storage.nbytes() <= SPARE * obj.nbytes
            self.places[key] = self.slot.lay(storage) if fits else None, storage
        place, _ = self.places[key]
        if place is None:
            return NotImplemented
        return laid, (place, storage.nbytes(), obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride())


def identity(value: Any) -> Any:
    return value


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is the values in its storage, and nothing else."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        return False
    unlike = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return not (unlike or tensor.is_shared())  # a shared one stays shared


def opened(memory: np.ndarray, packed: Packed) -> tuple[Any, int]:
    """Return the batch whose tensors are in this memory, and the number of their storages."""
    _opened.bytes, _opened.storages = memory, {}
    try:
        return loads(memory[packed.start : packed.stop].data), len(_opened.storages)
    finally:
        del _opened.bytes, _opened.storages


def visible(batch: Any) -> set[int]:
    """Return the storages of the tensors that `Upload` copies."""
    tensors = list[Tensor]()
    map_tensors(batch, tensors.append)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, Tensor)}


def received(pickled: bytes) -> Any:
    """Return a batch that was sent as torch sends it, with a file for each tensor."""
    try:
        return loads(pickled)
    except RuntimeError as error:
        if "ancdata" not in str(error):
            raise
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None


def laid(place: int, size: int, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: Any) -> Tensor:
    """Return a tensor in the slot that this thread has opened."""
    storages = _opened.storages
    if place not in storages:
        whole = torch.frombuffer(_opened.bytes, dtype=torch.uint8, count=size, offset=place)
        storages[place] = whole.untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storages[place], offset, shape, stride)
