"""Wraps torch.distributed's communicating functions in listeners, and reports each collective to observers.

No other module replaces these functions. Without a listener they are torch's own.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import AllReduce, reducing

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]  # a function's name, the function -> itself or a wrapper

# For each function of torch.distributed: the collective, and the parameter with its tensors. Older versions of torch
# lack some functions. Receives are not reported, because another rank's send is.
FUNCTIONS = {
    "all_reduce": ("all_reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "_broadcast_coalesced": ("broadcast", "tensors"),
    "all_gather": ("all_gather", "tensor_list"),
    "all_gather_single": ("all_gather", "output_tensor"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "all_to_all_single": ("all_to_all", "input"),
    "send": ("send", "tensor"),
    "isend": ("send", "tensor"),
}
BUILTIN = {"_broadcast_coalesced": ["process_group", "tensors"]}  # without a signature
# On a CPU these consist of messages between two ranks.
METHODS = {"gather": ("all_gather", "own"), "swap": ("all_to_all", "rows")}

# The functions that listeners may wrap: each name with the classes and modules that define it.
PLACES: dict[str, tuple[Any, ...]] = {
    "wait": (dist.Work,),
    **dict.fromkeys(FUNCTIONS, (dist, dist.distributed_c10d)),
    **dict.fromkeys(METHODS, (AllReduce,)),
}

_listeners: list[Wrap] = []  # in the order in which they were added; the first is the innermost
_originals: dict[tuple[Any, str], Any] = {}  # while there is a listener


def listen(listener: Wrap, stack: ExitStack) -> None:
    """Wrap each function by `listener` until `stack` closes. Adding an active listener again only counts it."""
    _listeners.append(listener)
    stack.callback(_leave, listener)
    if not _originals:
        places = ((owner, name) for name, owners in PLACES.items() for owner in owners if hasattr(owner, name))
        _originals.update({(owner, name): getattr(owner, name) for owner, name in places})
    _arrange()


def _leave(listener: Wrap) -> None:
    _listeners.remove(listener)
    _arrange()
    if not _listeners:
        _originals.clear()


def _arrange() -> None:
    wrapped: dict[tuple[str, int], Any] = {}
    for (owner, name), original in _originals.items():
        key = name, id(original)  # torch compares functions of two modules by identity
        if key not in wrapped:
            wrapped[key] = original
            for listener in dict.fromkeys(_listeners):
                wrapped[key] = listener(name, wrapped[key])
        setattr(owner, name, wrapped[key])


_inside: ContextVar[bool] = ContextVar("inside", default=False)  # whether this thread is in a call that is reported


class Call:
    """A collective of this rank, from its call to its end."""

    def __init__(self, collective: str, tensors: Tensor | Sequence[Tensor], group: Any, asynchronous: bool) -> None:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        self.collective = collective
        self.bytes = sum(tensor.nbytes for tensor in tensors)  # as nccl-tests counts them
        self.group: Any = group or dist.group.WORLD
        self.bucket: Bucket | None = reducing.get()  # whose reduction made the call, if any
        self.waits = not asynchronous  # so that the end is known; an asynchronous call ends elsewhere
        cuda = self.waits and tensors and tensors[0].is_cuda
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        for event in self.events[:1]:
            event.record()  # on the stream with which the collective synchronises
        self.began, self.took = time.perf_counter(), 0.0

    def end(self) -> None:
        self.took = time.perf_counter() - self.began
        for event in self.events[1:]:
            event.record()

    def arrived(self) -> bool:
        """Return whether `seconds` can be read without waiting."""
        return not self.events or self.events[1].query()

    def seconds(self) -> float:
        """Return the seconds of the collective, including the wait for its last rank."""
        return self.events[0].elapsed_time(self.events[1]) / 1e3 if self.events else self.took


@contextmanager
def watched(observe: Callable[[Call], None]) -> Iterator[None]:
    """Call `observe` after each collective of this process, in the calling thread.

    Collectives issued by C++ alone, as in DDP's own reducer or in compiled graphs, are not reported. Neither are calls
    with a group that excludes this rank, for which torch does nothing.
    """
    with ExitStack() as stack:
        listen(partial(_shown, observe), stack)
        yield


def _shown(observe: Callable[[Call], None], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    found = FUNCTIONS.get(name) or METHODS.get(name)
    if found is None:
        return function
    collective, tensors = found
    names = BUILTIN.get(name) or list(inspect.signature(function).parameters)

    @wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return function(*args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        group = given["self"].group if "self" in given else given.get("group") or given.get("process_group")
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return function(*args, **kwargs)
        call = Call(collective, given[tensors], group, name == "isend" or given.get("async_op", False))
        if name == "gather":
            call.bytes *= given["self"].size  # of all ranks
        token = _inside.set(True)
        try:
            result = function(*args, **kwargs)
        finally:
            _inside.reset(token)
        call.end()
        observe(call)
        return result

    return shown
