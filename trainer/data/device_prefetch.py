"""Copies batches to the device ahead of their use."""

import copy
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor


class Upload:
    """One batch on its way to the device of `stream`, on which batches are copied while others are computed."""

    def __init__(self, batch: Any, stream: torch.cuda.Stream) -> None:
        self.batch, self.stream, self.begun = batch, stream, False

    def begin(self) -> None:
        if not self.begun:
            with torch.cuda.stream(self.stream):
                self.batch, self.begun = map_tensors(self.batch, self._copy), True

    def wait(self) -> Any:
        """Make the current stream wait for the copy; return it."""
        self.begin()
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_stream(self.stream)
        map_tensors(self.batch, lambda t: t.record_stream(current) if t.is_cuda else None)
        return self.batch

    def take(self) -> Any:
        """Return the batch and forget it."""
        batch, self.batch = self.batch, None
        return batch

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # from other memory the copy would block this thread
        return tensor.to(self.stream.device, non_blocking=True)


def upload(micros: Iterator[Any], stream: "torch.cuda.Stream | None") -> Iterator[Any]:
    """Yield micro-batches with their `batch` on the device, and copy each while the one before is computed."""
    if stream is None:
        yield from micros
        return
    ahead: list[tuple[Any, Upload]] = []
    for following in itertools.chain(micros, [None]):
        given = ahead.pop() if ahead else None
        if given:
            given[1].wait()  # before the next begins, for it waits for all that has begun
        if following is not None:
            ahead.append((following._replace(batch=None), Upload(following.batch, stream)))
            ahead[0][1].begin()
        if given:
            yield given[0]._replace(batch=given[1].take())


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return `value` with each tensor changed, in new containers of the same classes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):  # of its own class, as transformers' BatchEncoding
        changed = copy.copy(value)
        changed.update({key: map_tensors(item, change) for key, item in value.items()})
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value
