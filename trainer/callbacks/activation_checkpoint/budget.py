"""Measures each block's saved bytes and time, and chooses the blocks to recompute within a budget."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from trainer.callbacks.activation_checkpoint.offload import owned
from trainer.callbacks.activation_checkpoint.recompute import Recompute
from trainer.parallel.warmup import wait

TIMED = 3  # timed forward passes per block
STATES = 1024  # limit on the states of the search, which is exhaustive for 10 blocks, or any number of equal ones


@dataclass
class Sizes:
    """The bytes that a rank's pass keeps between forward and backward, and the seconds of its blocks."""

    plain: int
    inputs: int
    freed: list[int]
    seconds: list[float]

    def kept(self, recomputed: list[int]) -> int:
        """Return the bytes that all blocks keep if those with these indices are recomputed."""
        others = sum(self.freed) - sum(self.freed[i] for i in recomputed)
        return self.inputs + others if recomputed else self.plain


class Meter:
    """Measures blocks while all of them are recomputed, so that a pass needs the memory of only one more block.

    A storage counts once, although a block's output is the next one's input. Weak references to storages prevent their
    addresses from being reused.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.device = device
        self.owned = owned(model)
        self.sizes: dict[int, int] = {}  # bytes of each storage, by its identity
        self.refs: dict[int, StorageWeakRef] = {}
        self.inputs, self.saved = set[int](), set[int]()  # storages of inputs; storages that plain blocks save
        self.outputs: list[tuple[int, int]] = []  # a block's index, and an output that it saves if not recomputed
        self.alive = set[int]()  # storages that are still referenced after the model's forward pass
        self.freed: dict[int, int] = {}
        self.seconds: dict[int, float] = {}

    def note(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the identities of the tensors' storages by address, except parameters and buffers."""
        found: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.owned:
                weak = StorageWeakRef(storage)
                self.refs.setdefault(weak.cdata, weak)
                self.sizes[weak.cdata] = storage.nbytes()
                found[storage.data_ptr()] = weak.cdata
        return found

    def wrap(self, index: int, block: nn.Module, forward: Recompute) -> Callable[..., Any]:
        """Return the block's `forward`, which also measures the block without recomputation."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.owned |= owned(block)  # FSDP lends a block its whole parameters for a pass
            inputs = self.note(tensors((args, kwargs)))
            self.inputs |= set(inputs.values())
            devices = [self.device.index] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                positions = self._measure(index, inputs, lambda: forward.forward(*args, **kwargs))
            output = forward(*args, **kwargs)
            for position, tensor in enumerate(tensors(output)):
                if position in positions:
                    self.outputs += [(index, identity) for identity in self.note([tensor]).values()]
            return output

        return measured

    def _measure(self, index: int, inputs: dict[int, int], run: Callable[[], Any]) -> set[int]:
        """Measure a block; return the positions of the outputs that it saves."""
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.owned:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run()
        self.saved |= {inputs[address] for address in kept.keys() & inputs.keys()}
        results = [tensor.untyped_storage().data_ptr() for tensor in tensors(output)]
        inner = kept.keys() - inputs.keys() - set(results)
        self.freed[index] = self.freed.get(index, 0) + sum(kept[address] for address in inner)
        del output
        times = [timed(run, self.device) for _ in range(TIMED)]
        self.seconds[index] = self.seconds.get(index, 0.0) + median(times)
        return {i for i, address in enumerate(results) if address in kept.keys() - inputs.keys()}

    def look(self, *_: Any) -> None:
        """Record which storages are still referenced, after the model's forward pass."""
        self.alive |= {identity for identity, weak in self.refs.items() if not weak.expired()}

    def result(self, blocks: int) -> Sizes:
        freed = [self.freed.get(i, 0) for i in range(blocks)]
        staying = set(self.inputs)
        for index, output in dict.fromkeys(self.outputs):
            if output in self.alive:
                staying.add(output)
                self.saved.add(output)
            else:
                freed[index] += self.sizes[output]
        inputs, saved = (sum(self.sizes[identity] for identity in each) for each in (staying, self.saved))
        return Sizes(saved + sum(freed), inputs, freed, [self.seconds.get(i, 0.0) for i in range(blocks)])


def measure(
    model: nn.Module, blocks: dict[nn.Module, Recompute], device: torch.device, run_pass: Callable[[], None]
) -> Sizes:
    meter = Meter(device, model)
    hook = model.register_forward_hook(meter.look)
    try:
        for index, (block, forward) in enumerate(blocks.items()):
            block.forward = meter.wrap(index, block, forward)
        run_pass()
    finally:
        hook.remove()
        for block, forward in blocks.items():
            block.forward = forward
    return meter.result(len(blocks))


def agree(sizes: Sizes, gather: Callable[[Any], list[Any]]) -> Sizes:
    """Return the largest sizes and the slowest times of all ranks. A collective."""
    ranks = [Sizes(**each) for each in gather(asdict(sizes))]
    largest, slowest = max(ranks, key=lambda rank: rank.plain), max(ranks, key=lambda rank: sum(rank.seconds))
    return Sizes(largest.plain, largest.inputs, largest.freed, slowest.seconds)


def choose(sizes: Sizes, budget: float) -> list[int]:
    """Return the indices of the blocks to recompute: at most `budget` of `sizes.plain` is kept, at the least cost in
    time.

    This is a 0/1 knapsack problem: a block that is kept takes bytes and saves seconds. If even the inputs exceed the
    budget, every block is recomputed.
    """
    everything = list(range(len(sizes.freed)))
    if sizes.plain <= budget * sizes.plain:
        return []
    capacity = budget * sizes.plain - sizes.inputs
    if capacity < 0:
        return everything
    states = {0: (0.0, 0)}  # bytes kept -> the most seconds saved, and the blocks as bits
    for i, (size, seconds) in enumerate(zip(sizes.freed, sizes.seconds, strict=True)):
        for taken, (saved, kept) in list(states.items()):
            if taken + size <= capacity and saved + seconds > states.get(taken + size, (-1.0, 0))[0]:
                states[taken + size] = saved + seconds, kept | 1 << i
        states = undominated(states, capacity)
    _, kept = max(states.values())
    return [i for i in everything if not kept >> i & 1]


def undominated(states: dict[int, tuple[float, int]], capacity: float) -> dict[int, tuple[float, int]]:
    """Drop states that keep more bytes than another but save no more seconds; leave at most `STATES`."""
    left: dict[int, tuple[float, int]] = {}
    best = -1.0
    for taken, state in sorted(states.items()):
        if state[0] > best:
            left[taken], best = state, state[0]
    if len(left) <= STATES:
        return left
    # Of each bin, the state that saves the most seconds.
    bins = {int(taken / capacity * (STATES - 1)): taken for taken in left}
    return {taken: left[taken] for taken in bins.values()}


def timed(run: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    began = time.monotonic()
    output = run()
    wait(device)
    seconds = time.monotonic() - began
    del output
    return seconds


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
