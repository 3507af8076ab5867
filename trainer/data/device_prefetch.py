"""Copies micro-batches to the device ahead of their use."""

import copy
import itertools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from trainer.data.batch import Micro


def upload(micros: Iterator[Micro], device: torch.device) -> Iterator[Micro]:
    """On CUDA, copies the next micro-batch on a stream of its own while this one is computed."""
    return copied_ahead(micros, device) if device.type == "cuda" else micros


def copied_ahead(micros: Iterator[Micro], device: torch.device) -> Iterator[Micro]:
    side = torch.cuda.Stream(device)

    def copy(micro: Micro) -> Micro:
        with torch.cuda.stream(side):
            return micro._replace(batch=map_tensors(micro.batch, lambda t: t.to(device, non_blocking=True)))

    ahead = [copy(micro) for micro in itertools.islice(micros, 1)]
    while ahead:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        micro = ahead.pop()
        map_tensors(micro.batch, lambda t: t.record_stream(current))  # noqa: B023 used at once
        ahead += [copy(m) for m in itertools.islice(micros, 1)]
        yield micro


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
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
