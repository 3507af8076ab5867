"""Copies batches to the device ahead of their use."""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

COPIED = deque[tuple[Any, Any]]()  # the end of a copy, and the batch whose memory it reads


class Upload:
    """Copies a batch to the device of `stream` while another batch is being computed."""

    def __init__(self, batch: Any, stream: torch.cuda.Stream) -> None:
        self.batch, self.stream, self.begun = batch, stream, False

    def begin(self) -> None:
        if not self.begun:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))  # which may still use the memory
            given = self.batch
            with torch.cuda.stream(self.stream):
                self.batch, self.begun = map_tensors(given, self._copy), True
            COPIED.append((self.stream.record_event(), given))  # else a data worker may fill its slot again
            while COPIED[0][0].query() and len(COPIED) > 1:
                COPIED.popleft()

    def wait(self) -> Any:
        """Return the copy; the current stream waits for it."""
        self.begin()
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return self.batch

    def take(self) -> Any:
        """Return the batch, and drop this object's reference to it."""
        batch, self.batch = self.batch, None
        return batch

    def _copy(self, value: Any) -> Any:
        if hasattr(value, "pin_memory") and not getattr(value, "is_cuda", False):
            value = value.pin_memory()  # a copy from pageable memory would block this thread
        try:
            return value.to(self.stream.device, non_blocking=True)
        except TypeError:  # its `to` accepts only a device
            return value.to(self.stream.device)


def upload(micros: Iterator[Any], stream: "torch.cuda.Stream | None") -> Iterator[Any]:
    """Yield micro-batches on the device, each copied while the previous one is being computed."""
    if stream is None:
        yield from micros
        return
    ahead: list[tuple[Any, Upload]] = []
    for following in itertools.chain(micros, [None]):
        current = ahead.pop() if ahead else None
        if current:
            current[1].wait()  # before the next copy begins, because `wait` waits for all copies that have begun
        if following is not None:
            ahead.append((following._replace(batch=None), Upload(following.batch, stream)))
            ahead[0][1].begin()
        if current:
            yield current[0]._replace(batch=current[1].take())


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy nested containers, with `change` applied to each tensor and each other object that has `to`."""
    if isinstance(value, Tensor):
        return change(value)
    kind: Any = type(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, change) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return kind(items)
        changed = copy.copy(value)  # with its attributes, such as those of transformers' BatchEncoding
        changed.update(items)
        return changed
    if hasattr(value, "to"):  # torch's PackedSequence, whose `batch_sizes` stay on the host
        return change(copy.copy(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return kind(map_tensors(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in fields(value):
            object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), change))  # may be frozen
        return changed
    return value
