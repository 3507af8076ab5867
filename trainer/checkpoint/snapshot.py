"""Copies a state to the host, as the files of a checkpoint."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from trainer.checkpoint.safetensors_buffer import SafetensorsBuffer, layout
from trainer.checkpoint.serialize import SECTION, STATE, Pack


class Snapshot:
    """A copy of a state on the host, as the files of a checkpoint. The next copy reuses the memory."""

    def __init__(self) -> None:
        self.buffers: dict[str, SafetensorsBuffer] = {}
        self.copied: torch.Event | None = None

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Allocate memory for such a state, because a first copy into new memory takes several times as long."""
        for section, value in state.items():
            packing = Pack()
            packing.encode(value, (section,))
            if packing.tensors:
                self.buffers[section] = SafetensorsBuffer(packing.tensors, touched=True)

    def take(self, state: Mapping[str, Any], file: str = STATE) -> dict[str, memoryview]:
        """Copy a state, and return its files, which are valid from `wait` until the next call.

        Each section's tensors are in SECTION.safetensors, and the rest is in `file`. A tensor is named by its path in
        the section, joined with "/", so that a module's state_dict keeps its names. Tensors that share memory are
        stored once, under the first name. Their memory layout is not kept. Other values than tensors, str, bool, int,
        float, None, dict, list and tuple raise TypeError, with their path.
        """
        content: dict[str, Any] = {}
        buffers: dict[str, SafetensorsBuffer] = {}
        for section, value in state.items():
            assert SECTION.fullmatch(section), section
            packing = Pack()
            content[section] = packing.encode(value, (section,))
            if packing.tensors:
                buffer = self.buffers.get(section)
                if buffer is None or buffer.layout != layout(packing.tensors):
                    buffer = SafetensorsBuffer(packing.tensors)
                buffer.copy(packing.tensors)
                buffers[section] = buffer
        self.buffers = buffers
        self.copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        files = {f"{section}.safetensors": buffer.content for section, buffer in buffers.items()}
        return {**files, file: memoryview(json.dumps(content, allow_nan=False, indent=1).encode("ascii"))}

    def wait(self) -> None:
        """Wait for copies from a GPU, which `take` only enqueues."""
        if self.copied is not None:
            self.copied.synchronize()
