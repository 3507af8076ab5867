"""Profiles the unsplit model before it is cut: each block's time and bytes, and the loss that the stages must match."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.log import log
from trainer.parallel.modes import evaluating, training
from trainer.parallel.warmup import buffers_kept, wait

PASSES = 3  # timed passes, of which the fastest counts; a warm-up pass comes first


class Trial(NamedTuple):
    """Seconds of a forward pass on one rank, its loss, and the bytes saved for the backward pass."""

    head: float  # before the first block
    blocks: list[float]
    tail: float  # after the last block
    loss: float
    saved: list[float]  # bytes before the blocks, per block, and after them
    stream: int  # the largest first argument of a block

    @property
    def total(self) -> float:
        return self.head + sum(self.blocks) + self.tail


class Stretches:
    """Times forward passes in stretches: before the blocks, each block, and after them.

    Only one block at a time is on the device. A block's stretch lasts until the next block, excluding the moves.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self.stream = 0
        inside = {id(module) for block in blocks for module in block.modules()}
        self.rest = [module for module in model.modules() if id(module) not in inside]
        self.handles = [block.register_forward_pre_hook(self._enter, with_kwargs=True) for block in blocks]
        self.handles += [block.register_forward_hook(self._leave) for block in blocks]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self._move_rest(torch.device("cpu"))
        for block in self.blocks:
            block.to("cpu")

    def run(self, call: Callable[[], Tensor]) -> float:
        self.seconds, self.saved = [0.0], [0.0]
        self.known: dict[int, StorageWeakRef] = {}  # while these live, no other storage can get their identity
        self._move_rest(self.device)
        for module in self.rest:
            self._know(module, recurse=False)
        self._resume()
        value = call().item()
        self._pause()
        return value

    def pack(self, tensor: Tensor) -> Any:
        """Count a tensor that autograd saves, and drop it, because no backward pass follows."""
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self.known:
            self.known[storage.cdata] = storage
            self.saved[-1] += tensor.untyped_storage().nbytes()

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._pause()
        sizes = [value.nbytes for value in (*args, *kwargs.values())[:1] if isinstance(value, Tensor)]
        self.stream = max([self.stream, *sizes])
        block.to(self.device)
        self._know(block)
        self._begin()

    def _leave(self, block: nn.Module, *_: Any) -> None:
        self._pause()
        if self.device.type != "cpu":
            block.to("cpu")
        if block is self.blocks[-1]:
            self._begin()
        else:
            self._resume()

    def _know(self, module: nn.Module, recurse: bool = True) -> None:
        """Exclude parameters and buffers from the count."""
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            storage = StorageWeakRef(tensor.untyped_storage())
            self.known.setdefault(storage.cdata, storage)

    def _begin(self) -> None:
        self.seconds.append(0.0)
        self.saved.append(0.0)
        self._resume()

    def _pause(self) -> None:
        wait(self.device)
        self.seconds[-1] += time.perf_counter() - self.began

    def _resume(self) -> None:
        wait(self.device)
        self.began = time.perf_counter()

    def _move_rest(self, device: torch.device) -> None:
        for module in self.rest:
            module._apply(lambda tensor: tensor.to(device), recurse=False)


def try_whole(
    model: nn.Module, blocks: Sequence[nn.Module], loss: Callable[[], Tensor], device: torch.device
) -> Trial | None:
    """Run the whole model with one block at a time on the device, and return it to the host. None if that fails.

    `loss` computes the loss of a micro-batch.
    """
    trials: list[Trial] = []
    stretches = Stretches(model, blocks, device)
    try:
        with torch.random.fork_rng(), buffers_kept(model):
            with torch.no_grad(), evaluating(model):
                for _ in range(1 + PASSES):
                    value, seconds = stretches.run(loss), stretches.seconds
                    if len(seconds) != len(blocks) + 2:
                        return None
                    trials.append(Trial(seconds[0], seconds[1:-1], seconds[-1], value, [], 0))
            with training(model), saved_tensors_hooks(stretches.pack, lambda nothing: nothing):
                stretches.run(loss)
                if len(stretches.saved) != len(blocks) + 2:
                    return None
    except Exception as error:  # too little memory for a block, or a loss that needs the training mode
        log.info("pipeline: the model does not run in one piece (%s)", " ".join(str(error).split())[:200])
        return None
    finally:
        stretches.close()
    best = min(trials[1:], key=lambda trial: trial.total)
    return best._replace(saved=stretches.saved, stream=stretches.stream)
