"""A copy of a state on the host, as the files of a checkpoint, in memory that is used again for the next."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from trainer.checkpoint.safetensors_buffer import Image, kinds
from trainer.checkpoint.serialize import SECTION, STATE, Pack


class Snapshot:
    """Copies of a state on the host, as the files of a checkpoint. Each copy uses the memory of the one before."""

    def __init__(self) -> None:
        self.images: dict[str, Image] = {}
        self.copied: torch.Event | None = None

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Allocate memory for such a state: a first copy into new memory takes several times as long."""
        for section, value in state.items():
            packing = Pack()
            packing.encode(value, (section,))
            if packing.tensors:
                self.images[section] = Image(packing.tensors)
                self.images[section].touch()

    def take(self, state: Mapping[str, Any], file: str = STATE) -> dict[str, memoryview]:
        """Copy a state, and return its files: SECTION.safetensors for the tensors of each section, `file` for the
        rest. They are valid from `wait` until the next call.

        The name of a tensor is its path in the section, joined with "/", so a module's state_dict keeps its own names.
        Tensors that are the same memory are stored once, under the first name. Layout in memory is not kept.

        Raises:
            TypeError: A value is no tensor, str, bool, int, float, None, dict, list or tuple. The message has its path.
        """
        content: dict[str, Any] = {}
        images: dict[str, Image] = {}
        for section, value in state.items():
            assert SECTION.fullmatch(section), section
            packing = Pack()
            content[section] = packing.encode(value, (section,))
            if packing.tensors:
                image = self.images.get(section)
                if image is None or image.kinds != kinds(packing.tensors):
                    image = Image(packing.tensors)
                image.copy(packing.tensors)
                images[section] = image
        self.images = images
        self.copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        files = {f"{section}.safetensors": image.buffer for section, image in images.items()}
        return {**files, file: memoryview(json.dumps(content, allow_nan=False, indent=1).encode("ascii"))}

    def wait(self) -> None:
        """Wait for copies from a GPU, which `take` only enqueues."""
        if self.copied is not None:
            self.copied.synchronize()
