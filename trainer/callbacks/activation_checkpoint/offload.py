"""Moves tensors that a block saves for its backward pass to host memory, and copies them back ahead of their use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LEAST = 512  # bytes: CUDA's allocator has no smaller blocks, so a smaller tensor may free nothing


class Offload:
    """A block's `forward` whose saved tensors are in host memory until its backward pass.

    Parameters, buffers, small tensors, subclasses and tensors of other devices are not moved. All blocks of the model
    share `copies`.
    """

    def __init__(self, forward: Callable[..., Any], module: nn.Module, copies: "Copies") -> None:
        self.forward, self.module, self.copies = forward, module, copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        call = Call(self.copies, owned(self.module))  # per call: FSDP lends a block whole parameters for a pass
        with saved_tensors_hooks(call.pack, call.unpack):
            output = self.forward(*args, **kwargs)
        call.send()
        return output


class Saved:
    """The memory of saved tensors: on the device, on the host, or on both."""

    def __init__(self, device: torch.UntypedStorage) -> None:
        self.device: torch.UntypedStorage | None = device
        self.host: Tensor | None = None


@dataclass
class View:
    """A saved tensor, as a view of its memory. Strides are preserved, because kernels are chosen by them."""

    saved: Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        assert self.saved.device is not None
        empty = torch.empty(0, dtype=self.dtype, device=self.saved.device.device)
        return empty.set_(self.saved.device, self.offset, self.size, self.stride)


class Call:
    """One forward pass of one block, with the tensors that it saved.

    They leave the device when the next block has run, until when the copies overlap with it. In the backward pass they
    come back while the following block runs. Memory at addresses in `owned` stays on the device.
    """

    def __init__(self, copies: "Copies", owned: set[int]) -> None:
        self.copies, self.owned = copies, owned
        self.open: dict[int, Saved] = {}  # by address, while their memory is held
        self.versions: list[tuple[Tensor, int]] = []
        self.saved: list[ReferenceType[Saved]] = []
        self.fetching = self.fetched = False
        copies.settle()
        self.previous = ref(copies.last) if copies.last else lambda: None

    def pack(self, tensor: Tensor) -> Tensor | View:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        stays = storage.nbytes() < LEAST or storage.data_ptr() in self.owned or tensor.device != self.copies.device
        if stays or tensor.is_conj() or tensor.is_neg():
            return tensor
        saved = self.open.setdefault(storage.data_ptr(), Saved(storage))
        self.versions.append((tensor.detach(), tensor._version))  # the tensor itself would keep its graph
        return View(saved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def send(self) -> None:
        """Start copying to the host, and free the previous block's memory on the device."""
        self.refuse_changes()
        pairs: list[tuple[Tensor, Tensor]] = []
        for saved in self.open.values():
            assert saved.device is not None
            saved.host = self.copies.host(saved.device.nbytes())
            pairs.append((saved.host, flat(saved.device)))
        self.saved = [ref(saved) for saved in self.open.values()]
        self.sent = self.copies.start(pairs)
        if self.copies.last:
            self.copies.last.leave()
        self.copies.last = self if self.open else None

    def leave(self) -> None:
        """Free the memory on the device once everything is on the host."""
        self.refuse_changes()
        self.copies.wait(self.sent)
        for saved in self.open.values():
            saved.device = None
        self.forget()

    def forget(self) -> None:
        self.open, self.versions = {}, []

    def refuse_changes(self) -> None:
        """Raise RuntimeError, as autograd does without hooks, if a saved tensor was changed in place."""
        for tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    "activation_checkpoint: policy=offload: a tensor of shape "
                    f"{tuple(tensor.shape)} was changed in place after it was saved for the backward pass; "
                    "use an operation that is not in place, or policy=full"
                )

    def unpack(self, packed: Tensor | View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self.fetched:
            self.arrive()
        return packed.tensor()

    def arrive(self) -> None:
        """Wait until everything is on the device, and start fetching what the previous block saved."""
        self.fetched = True
        if self.copies.last is self:  # the last block was never moved
            self.refuse_changes()
            self.copies.wait(self.sent)  # its memory is freed in the course of the backward pass
            self.copies.last = None
            self.forget()
        else:
            self.fetch()
        self.copies.settle()
        if previous := self.previous():
            previous.fetch()

    def fetch(self) -> None:
        if self.fetching:
            return
        self.fetching = True
        self.copies.settle()
        pairs: list[tuple[Tensor, Tensor]] = []
        for saved in filter(None, (saved() for saved in self.saved)):
            if saved.device is None and saved.host is not None:
                device = torch.empty(saved.host.numel(), dtype=torch.uint8, device=self.copies.device)
                saved.device = device.untyped_storage()
                pairs.append((device, saved.host))
        self.copies.coming = pairs, self.copies.start(pairs)


class Copies:
    """Copies between a device and pinned host memory on a side stream. Without CUDA, copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: Call | None = None
        self.coming: tuple[list[tuple[Tensor, Tensor]], torch.Event | None] | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> "Copies":
        return self  # an average of the model has no backward pass

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.Event | None:
        """Start copying the second tensor of each pair to the first, after all work so far."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        """Make the compute stream wait for all pending copies, whose memory is kept even if the graph is dropped."""
        if self.coming:
            self.wait(self.coming[1])
            self.coming = None


def owned(module: nn.Module) -> set[int]:
    """Return the memory addresses of parameters and buffers, except tensor subclasses, which have none."""
    own = (*module.parameters(), *module.buffers())
    return {tensor.untyped_storage().data_ptr() for tensor in own if type(tensor) in (Tensor, nn.Parameter)}


def flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
