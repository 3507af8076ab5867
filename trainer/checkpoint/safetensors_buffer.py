"""Lays out tensors as the bytes of a safetensors file, in memory that the next checkpoint reuses."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.comm.device import pin

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.complex64: "C64", torch.bool: "BOOL",
}  # fmt: skip


class SafetensorsBuffer:
    """The bytes of a safetensors file on the host, with a view of each tensor into them.

    The safetensors package's own writer copies once more, and holds the interpreter's lock while it writes. Tensors are
    sorted by element size, largest first, so that all are aligned, as readers expect. `touched` makes the system
    allocate the memory now instead of at the first copy; with a GPU it always does.
    """

    def __init__(self, tensors: Mapping[str, Tensor], touched: bool = False) -> None:
        self.layout = layout(tensors)
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
        cuda = any(tensor.is_cuda for tensor in tensors.values())
        if touched or cuda:  # writing to a page allocates it; if CUDA did this, training would wait
            self.bytes.zero_()
        if cuda:
            pin(self.bytes)
        self.bytes[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        data = self.bytes[len(first) :]
        self.views: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"]  # pyright: ignore[reportIndexIssue]
            self.views[name] = data[begin:end].view(tensor.dtype).view(tensor.shape)

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of the same names, shapes and dtypes. On a GPU this only enqueues the copy."""
        if tensors:
            torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()), non_blocking=True)

    @property
    def content(self) -> memoryview:
        return self.bytes.numpy().data


def layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bool]]:
    """Return each tensor's dtype, shape and device type. Tensors with equal layouts fit the same buffer."""
    return {name: (tensor.dtype, tensor.shape, tensor.is_cuda) for name, tensor in tensors.items()}
