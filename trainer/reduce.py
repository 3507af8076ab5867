"""The chain that averages gradients over ranks: what a flat tensor holds, the all-reduce at the chain's end, and the
thread or stream beside the backward pass that runs it."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class Piece(NamedTuple):
    """Elements `start` to `stop` of a flattened parameter."""

    param: Tensor
    start: int
    stop: int


class Bucket:
    """What a flat tensor holds: pieces of parameters, in order; mostly whole ones.

    Args:
        step: The step whose gradients these are, for what depends on it: `trainer.step` may have moved on.
        kind: Residuals of gradients and of weights are never mixed.
        whole: The pieces of the bucket that it was cut from, of which other ranks have the rest.
    """

    def __init__(
        self, pieces: Iterable[Piece], step: int, kind: str = "gradients", whole: tuple[Piece, ...] = ()
    ) -> None:
        self.pieces, self.step, self.kind = tuple(pieces), step, kind
        self.whole = whole or self.pieces

    @classmethod
    def of(cls, params: Iterable[Tensor], step: int, kind: str = "gradients") -> "Bucket":
        return cls((Piece(p, 0, p.numel()) for p in params), step, kind)

    def split(self, flat: Tensor) -> list[Tensor]:
        """A view of each piece; in the parameter's shape where it is whole."""
        parts = flat.split([stop - start for _, start, stop in self.pieces])
        return [
            part.view_as(p) if stop - start == p.numel() else part
            for part, (p, start, stop) in zip(parts, self.pieces, strict=True)
        ]

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """A view of each whole parameter's part, laid out in memory as the parameter is: DDP fills its buckets so."""
        parts = flat.split([p.numel() for p, _, _ in self.pieces])
        return [
            part.as_strided(p.shape, p.stride(), part.storage_offset()) if dense(p) else part.view_as(p)
            for part, (p, _, _) in zip(parts, self.pieces, strict=True)
        ]

    def cut(self, start: int, stop: int) -> "Bucket":
        """What elements `start` to `stop` of the flat tensor hold; fewer where that is past its end."""
        pieces, offset = [], 0
        for p, first, last in self.pieces:
            low, high = max(first, first + start - offset), min(last, first + stop - offset)
            if low < high:
                pieces.append(Piece(p, low, high))
            offset += last - first
        return Bucket(pieces, self.step, self.kind, self.whole)


def dense(p: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in any order."""
    return sum((size - 1) * stride for size, stride in zip(p.shape, p.stride())) + 1 == p.numel()


# Mean over ranks of a flat tensor, in place or not: same shape and dtype. Plain blocking code, run by `Background`.
Reduce = Callable[[Tensor, Bucket], Tensor]


# Older versions of torch have the second names only, newer ones warn of them.
def all_gather(rows: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(rows, own, group=group)


def reduce_scatter(own: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, rows, group=group)


def exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """sent[r] goes to rank r of the group, into its received[this rank].

    On a CPU: gloo's collectives for this say that a peer may send only behind what they send themselves, so unless all
    ranks start in the same moment, the two directions of a link take turns.
    """
    ranks, own = dist.get_process_group_ranks(group), group.rank()
    received[own].copy_(sent[own])
    others = [(own + k) % len(ranks) for k in range(1, len(ranks))]  # no two ranks send to the same one at a time
    coming = [dist.irecv(received[r], ranks[r], group) for r in others]
    for r in others:
        dist.send(sent[r], ranks[r], group)
    for work in coming:
        assert work is not None
        work.wait()


class AllReduce:
    """The end of the chain: the mean over the ranks of `group`, and what codecs need whose payloads can't be summed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """Scales before it sums and by the reciprocal, as DDP's own reducer does: the same bits."""
        dist.all_reduce(flat.mul_(1.0 / self.size), group=self.group)
        return flat

    def gather(self, own: Tensor) -> Tensor:
        """(n,) of each rank, of the same n -> (ranks, n)."""
        rows = own.new_empty(self.size, own.numel())
        if own.device.type == "cpu":
            exchange([own] * self.size, rows.unbind(), self.group)
        else:
            all_gather(rows.view(-1), own, self.group)
        return rows

    def swap(self, rows: Tensor) -> Tensor:
        """(ranks, n): row r goes to rank r, and what comes back are the rows that all ranks had for this one."""
        swapped = torch.empty_like(rows)
        if rows.device.type == "cpu":
            exchange(rows.unbind(), swapped.unbind(), self.group)
        else:
            dist.all_to_all_single(swapped, rows, group=self.group)
        return swapped


class Background:
    """Runs calls one by one, in order, beside the caller: on a thread (CPU) or a stream (CUDA)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.failed: Exception | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reduce")

    def submit(self, call: Callable[..., Tensor], *args: Any) -> "Future[Tensor]":
        """An exception in `call` is raised by the future's `wait`; on a stream, here."""
        if self.stream is None:
            done: Future[Tensor] = Future()
            self.thread.submit(self._run, done, call, *args)
            return done
        done = Future(devices=[self.device])
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in args:
            if isinstance(tensor, Tensor):
                tensor.record_stream(self.stream)  # the caller may drop it: its memory stays
        with torch.cuda.stream(self.stream):
            done.set_result(call(*args))  # enqueued, not finished: `wait` makes the waiting stream wait
        return done

    def _run(self, done: "Future[Tensor]", call: Callable[..., Tensor], *args: Any) -> None:
        try:
            if self.failed:
                raise self.failed  # peers wait for what has failed: nothing later may go in its place
            result = call(*args)
        except Exception as error:
            self.failed = error
            done.set_exception(error)  # pyright: ignore[reportArgumentType] typed for one class only
        else:
            done.set_result(result)


def distribute(trainer: "Trainer") -> DistributedDataParallel:
    """The model as DDP lays it out by `trainer.ddp`, with the trainer's chain for its reducer where there is one."""
    device_ids = [trainer.device.index] if trainer.device.type == "cuda" else None
    model = DistributedDataParallel(trainer.module, device_ids=device_ids, **trainer.ddp)
    if trainer.reduce:
        model.register_comm_hook(None, comm_hook(trainer, trainer.reduce))
    return model


def comm_hook(trainer: "Trainer", reduce: Reduce) -> Callable[[None, dist.GradBucket], "Future[Tensor]"]:
    background = Background(trainer.device)

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        done = background.submit(reduce, bucket.buffer(), Bucket.of(bucket.parameters(), trainer.step))
        # DDP takes an exception that a future was given for its value; one in a `then` it raises.
        return done.then(lambda done: done.value())

    return hook
