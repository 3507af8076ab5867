"""Records when a forward pass needs parameters, and derives the order in which to send their buckets."""

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import Reduce

PASSES = 5  # passes of a rehearsal, because the times of a single one are too noisy


class Record:
    """The rehearsal's times, in seconds: of each module's call, each gradient and each reduction.

    Only one of the last passes counts: the one with the shortest backward pass, because it has waited least.
    """

    def __init__(self, module: nn.Module, params: list[nn.Parameter]) -> None:
        self.module = module
        self.called_s: dict[nn.Module, float] = {}
        self.ready_s: dict[Tensor, float] = {}
        self.passes = [(self.called_s, self.ready_s)]
        self.send_s: dict[int, float] = {}  # number of elements -> seconds
        self.layout: list[list[Tensor]] = []  # the parameters in each of DDP's buckets, of the last pass
        self.hooks: list[Any] = [
            *(child.register_forward_pre_hook(lambda child, _: self._note_call(child)) for child in module.modules()),
            *(p.register_post_accumulate_grad_hook(self._note_gradient) for p in params),
        ]

    def _note_call(self, module: nn.Module) -> None:
        if module is self.module and self.ready_s:
            self.called_s, self.ready_s, self.layout = {}, {}, []
            self.passes.append((self.called_s, self.ready_s))
        self.called_s.setdefault(module, time.monotonic())  # later calls may be recomputations in the backward pass

    def _note_gradient(self, p: Tensor) -> None:
        self.ready_s[p] = now(p.device)

    def timed(self, reduce: Reduce) -> Reduce:
        def timed(flat: Tensor, bucket: Bucket) -> Tensor:
            self.layout.append([piece.param for piece in bucket.pieces])
            began = now(flat.device)
            mean = reduce(flat, bucket)
            took = now(flat.device) - began
            self.send_s[flat.numel()] = min(took, self.send_s.get(flat.numel(), took))
            return mean

        return timed

    def end(self) -> dict[nn.Module, list[Tensor]]:
        """Stop recording; return the parameters that a call of each module needs."""
        for hook in self.hooks:
            hook.remove()
        whole = [times for times in self.passes if times[1]][-PASSES:]
        self.called_s, self.ready_s = min(whole, key=lambda times: max(times[1].values()) - min(times[1].values()))
        self.passes.clear()
        self.needs = needed_by(self.module, self.module, set(self.called_s))
        return self.needs

    def order(self) -> list[int]:
        """Return the order in which to send the buckets of `layout`."""
        last_s = max(self.ready_s.values())  # for parameters that the pass did not use
        need_s: dict[Tensor, float] = {}
        for module, params in self.needs.items():
            need_s |= {p: min(self.called_s[module], need_s.get(p, math.inf)) for p in params}
        rate = sum(self.send_s.values()) / sum(self.send_s)
        return send_order(
            ready_s=[max(self.ready_s.get(p, last_s) for p in bucket) for bucket in self.layout],
            need_s=[min(need_s.get(p, math.inf) for p in bucket) for bucket in self.layout],
            send_s=[rate * sum(p.numel() for p in bucket) for bucket in self.layout],
        )


def now(device: torch.device) -> float:
    """Return the time after the device has finished all work that this thread has enqueued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.monotonic()


def needed_by(module: nn.Module, caller: nn.Module, called: set[nn.Module]) -> dict[nn.Module, list[Tensor]]:
    """Return the parameters that a call of a module needs: its own, and those of children that are never called.

    For example, nn.MultiheadAttention uses its projection's weight without calling the projection. `called` has the
    modules that the rehearsal called.
    """
    caller = module if module in called else caller
    own: list[Tensor] = list(module.parameters(recurse=False))
    needed = {caller: own} if own else {}
    for child in module.children():
        for user, params in needed_by(child, caller, called).items():
            needed[user] = needed.get(user, []) + params
    return needed


def send_order(ready_s: list[float], need_s: list[float], send_s: list[float]) -> list[int]:
    """Order buckets by when each is ready, when it is needed, and how long sending takes.

    Whenever the link is free, the ready bucket that is needed first is sent, without interruption. This is
    ByteScheduler's order (Peng et al. 2019), computed in advance.
    """
    waiting, order, now = set(range(len(ready_s))), list[int](), min(ready_s)
    while waiting:
        ready = [i for i in waiting if ready_s[i] <= now] or [min(waiting, key=lambda i: (ready_s[i], i))]
        chosen = min(ready, key=lambda i: (need_s[i], i))
        order.append(chosen)
        waiting.remove(chosen)
        now = max(now, ready_s[chosen]) + send_s[chosen]
    return order
