"""Shows each collective that this process makes to an observer, without waiting for the device."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import AllReduce, reducing

Read = Callable[..., tuple[Any, Any, bool]]  # takes a function's arguments; returns tensors, group, whether it is async

# Functions of torch.distributed: the collective, and a function with the same names of arguments. Older versions of
# torch lack some. Receives are not shown: a rank sends what another receives.
FUNCTIONS: dict[str, tuple[str, Read]] = {
    "all_reduce": ("all_reduce", lambda tensor, op=None, group=None, async_op=False, **_: (tensor, group, async_op)),
    "broadcast": (
        "broadcast",
        lambda tensor, src=None, group=None, async_op=False, group_src=None, **_: (tensor, group, async_op),
    ),
    "_broadcast_coalesced": (
        "broadcast",
        lambda process_group, tensors, buffer_size, src=0: (tensors, process_group, False),
    ),
    "all_gather": (
        "all_gather",
        lambda tensor_list, tensor, group=None, async_op=False, **_: (tensor_list, group, async_op),
    ),
    "reduce_scatter": (
        "reduce_scatter",
        lambda output, input_list, op=None, group=None, async_op=False, **_: (input_list, group, async_op),
    ),
    "all_to_all_single": (
        "all_to_all",
        lambda output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False, **_: (
            (input, group, async_op)
        ),
    ),
    "send": ("send", lambda tensor, dst=None, group=None, *_, **__: (tensor, group, False)),
    "isend": ("send", lambda tensor, dst=None, group=None, *_, **__: (tensor, group, True)),
}
for _name in ("all_gather_single", "all_gather_into_tensor"):
    FUNCTIONS[_name] = (
        "all_gather",
        lambda output_tensor, input_tensor, group=None, async_op=False, **_: (output_tensor, group, async_op),
    )
for _name in ("reduce_scatter_single", "reduce_scatter_tensor"):
    FUNCTIONS[_name] = (
        "reduce_scatter",
        lambda output, input, op=None, group=None, async_op=False, **_: (input, group, async_op),
    )
# On a CPU these are made of messages between two ranks.
METHODS: dict[str, tuple[str, Read]] = {
    "gather": ("all_gather", lambda self, own: ([own] * self.size, self.group, False)),
    "swap": ("all_to_all", lambda self, rows: (rows, self.group, False)),
}

_inside: ContextVar[bool] = ContextVar("inside", default=False)  # this thread is in a call that is shown as a whole


class Call:
    """A collective of this rank, from its call to its end.

    Attributes:
        bytes: As nccl-tests counts them.
        bucket: The bucket whose reduction made the call; None for any other call.
        waits: Whether the end is known. A call that returns at once has its end elsewhere.
    """

    def __init__(self, collective: str, tensors: Tensor | Sequence[Tensor], group: Any, asynchronous: bool) -> None:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        self.collective, self.bytes = collective, sum(tensor.nbytes for tensor in tensors)
        self.group: Any = group or dist.group.WORLD
        self.bucket: Bucket | None = reducing.get()
        self.waits = not asynchronous
        cuda = self.waits and tensors and tensors[0].is_cuda
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        for event in self.events[:1]:
            event.record()  # on the stream that the collective waits for
        self.began, self.took = time.perf_counter(), 0.0

    def end(self) -> None:
        self.took = time.perf_counter() - self.began
        for event in self.events[1:]:
            event.record()

    def arrived(self) -> bool:
        """Return whether `seconds` can be read without waiting."""
        return not self.events or self.events[1].query()

    def seconds(self) -> float:
        """Return the seconds of the collective, with the wait for the last of its ranks."""
        return self.events[0].elapsed_time(self.events[1]) / 1e3 if self.events else self.took


@contextmanager
def watched(observe: Callable[[Call], None]) -> Iterator[None]:
    """Call `observe` after each collective of this process, in the thread that makes it.

    Not shown are collectives that C++ makes by itself: those of DDP's own reducer and of compiled graphs.
    """
    with ExitStack() as undo:
        for owners, functions in (((dist, dist.distributed_c10d), FUNCTIONS), ((AllReduce,), METHODS)):
            for name, (collective, read) in functions.items():
                present = [owner for owner in owners if hasattr(owner, name)]
                shown = _shown(getattr(present[0], name), collective, read, observe) if present else None
                for owner in present:
                    undo.callback(setattr, owner, name, getattr(owner, name))
                    setattr(owner, name, shown)
        yield


def _shown(
    function: Callable[..., Any], collective: str, read: Read, observe: Callable[[Call], None]
) -> Callable[..., Any]:
    @wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return function(*args, **kwargs)
        call, token = Call(collective, *read(*args, **kwargs)), _inside.set(True)
        try:
            result = function(*args, **kwargs)
        finally:
            _inside.reset(token)
        call.end()
        observe(call)
        return result

    return shown
