"""Tensors as the bytes of a safetensors file, in memory that is used again for the next."""

import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.complex64: "C64", torch.bool: "BOOL",
}  # fmt: skip


class Image:
    """The file's bytes, on the host, and in it a view for each tensor: to copy into a view is to write to the file.

    Our own writer of the format, because safetensors' holds the interpreter while it writes, and wants a copy first.
    Tensors lie in the order of their element's size, largest first, so each is aligned, as its readers expect.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.kinds = kinds(tensors)
        header: dict[str, object] = {}
        end = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
            header[name] = {
                "dtype": DTYPES[tensors[name].dtype],
                "shape": list(tensors[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        first = len(text).to_bytes(8, "little") + text
        self.bytes = torch.empty(len(first) + end, dtype=torch.uint8)
        if any(tensor.is_cuda for tensor in tensors.values()):
            pin(self.bytes)
        self.bytes[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        data = self.bytes[len(first) :]
        self.views: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"]  # pyright: ignore[reportIndexIssue]
            self.views[name] = data[begin:end].view(tensor.dtype).view(tensor.shape)

    def touch(self) -> None:
        """Make the system give the memory now."""
        for view in self.views.values():
            view.zero_()

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the same names, shapes and dtypes. On a GPU the copy is only enqueued, in the current
        stream.
        """
        if tensors:
            torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()), non_blocking=True)

    @property
    def buffer(self) -> memoryview:
        return self.bytes.numpy().data


def kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bool]]:
    """Return the dtype, shape and device of each tensor: tensors of equal kinds fit the same image."""
    return {name: (tensor.dtype, tensor.shape, tensor.is_cuda) for name, tensor in tensors.items()}


def pin(memory: Tensor) -> None:
    """Lock its pages, for a device to copy beside the host. torch's pinned memory is rounded up to a power of two."""
    cuda: Any = torch.cuda.cudart()
    start = memory.data_ptr()
    torch.cuda.check_error(cuda.cudaHostRegister(start, memory.numel(), 0))
    weakref.finalize(memory.untyped_storage(), cuda.cudaHostUnregister, start).atexit = False
