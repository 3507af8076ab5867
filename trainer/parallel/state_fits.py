"""Refuses a run whose weights, gradients and optimizer state exceed memory, before the latter two exist."""

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.comm.ranks import Ranks
from trainer.comm.slices import local
from trainer.errors import ConfigError
from trainer.parallel.memory_search import state_share
from trainer.parallel.sparse import sparse_weights
from trainer.parallel.strategy import Strategy
from trainer.process import cgroup

GIB = 1 << 30
SMALL = 64 << 20  # bytes of a rank's weights below which nothing is checked


def refuse_too_large(
    strategy: Strategy,
    module: nn.Module,
    new_optimizer: Callable[[nn.Module], Optimizer],
    ranks: Ranks,
    *,
    averaged: bool,
    in_backward: bool,
) -> None:
    """Compare the bytes that the first steps add, on a GPU or on all ranks of a host, with those that are free there.

    Only certain memory counts; activations and the overhead of torch and kernels come on top. Raise ConfigError on
    every rank if one lacks memory. A collective. `averaged` states whether a callback keeps an average of the weights,
    `in_backward` whether one steps parameters in the backward pass, and may free their gradients.
    """
    weights = size(chain(module.parameters(), module.buffers()))
    if max(ranks.each(weights)) < SMALL:
        return
    device = local(strategy.parameters[0]).device if strategy.parameters else ranks.device
    adds = added_bytes(strategy, module, state_share(new_optimizer, ranks.device, min), averaged, in_backward)
    place, on_gpu = ranks.place, device.type == "cuda"
    first = place.rank - place.local_rank
    of_host = ranks.each([adds, weights])[first : first + place.local_world]
    needed, held = (adds, weights) if on_gpu else map(sum, zip(*of_host, strict=True))
    free = free_bytes(device)  # after `each`, so that all ranks hold their weights
    refused = ""
    if free is not None and needed > free:
        users = f"rank {place.rank}" if on_gpu else f"{len(of_host)} rank(s) of this machine"
        refused = (
            f"weights, gradients and optimizer state of {users} take {(needed + held) / GIB:.1f} GiB, and "
            f"{(free + held) / GIB:.1f} GiB of {'its GPU' if on_gpu else 'memory'} are available"
        )
    if reason := next(filter(None, ranks.each(refused)), ""):
        fewer = "" if on_gpu or place.local_world == 1 else "fewer trainer.devices, "
        shard = "'+callbacks=[shard]'" if strategy.owned is None else "callbacks.shard.stage=3"
        shard = f"{shard}, " if ranks.world > 1 and strategy.whole else ""
        ways = f"{fewer}{shard}a smaller model or a machine with more memory"
        raise ConfigError(f"trainer.devices={place.local_world}: {reason}; use {ways}")


def added_bytes(strategy: Strategy, module: nn.Module, share: float, averaged: bool, in_backward: bool) -> int:
    """Return the bytes that this rank adds after the first pass begins; `share` is from `state_share`."""
    stepped = strategy.parameters if strategy.owned is None else strategy.owned
    state = sum(int(share * p.numel() * max(4, p.element_size())) for p in map(local, stepped))
    # Without buckets, gradients of other owners may be freed early. A sparse gradient has the rows of a batch.
    gradients = strategy.parameters if strategy.owned is None or strategy.bucket_bytes else stepped
    sparse = set(sparse_weights(module).values())
    dense = size(p for p in gradients if p not in sparse)
    kept = 0 if in_backward else dense + min(dense, strategy.bucket_bytes)
    return state + kept + averaged * size(module.parameters())


def size(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, or of this host with its swap; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = cgroup.available_memory()
    return found and found.free + found.swap
