"""Averages gradients over ranks: the all-reduce at the end of the chain, and the thread or stream that runs it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from trainer.comm.bucket import Bucket
from trainer.comm.phases import Phase, during

# Returns the mean over ranks of a flat tensor, in place or not: same shape and dtype. Blocking; `Background` runs it.
Reduce = Callable[[Tensor, Bucket], Tensor]

reducing: ContextVar[Bucket | None] = ContextVar("reducing", default=None)  # the bucket that this thread reduces


# Older versions of torch have only the second names, about which newer ones warn.
def all_gather(rows: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(rows, own, group=group)


def reduce_scatter(own: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(own, rows, group=group)


def exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send sent[r] to rank r of the group, into its received[this rank]. For CPU tensors.

    In gloo's own collectives, a peer sends only once a message has arrived. Unless all ranks start at the same moment,
    the two directions of a link then take turns.
    """
    ranks, own = dist.get_process_group_ranks(group), group.rank()
    received[own].copy_(sent[own])
    others = [(own + k) % len(ranks) for k in range(1, len(ranks))]  # no two ranks send to the same rank at once
    receives = [dist.irecv(received[r], ranks[r], group) for r in others]
    for r in others:
        dist.send(sent[r], ranks[r], group)
    for work in receives:
        assert work is not None
        work.wait()


class AllReduce:
    """The end of the chain: the mean over the ranks of `group`. Payloads that can't be summed are exchanged instead."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    def __call__(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """Average, in place if dense. Scaling by the reciprocal before the sum gives the same bits as DDP's reducer."""
        flat.mul_(1.0 / self.size)
        if flat.is_sparse:
            return self._sum_rows(flat.coalesce())
        dist.all_reduce(flat, group=self.group)
        return flat

    def _sum_rows(self, own: Tensor) -> Tensor:
        """Sum the rows of sparse tensors in rank order, because gloo's own sum corrupts memory in torch 2.13."""
        counts = self.gather(own.indices().new_tensor([own._nnz()])).flatten().tolist()
        rows, place = self._gather_rows(own.indices()[0], counts).unique(return_inverse=True)
        sums = own.values().new_zeros(len(rows), *own.shape[1:])
        sums.index_add_(0, place, self._gather_rows(own.values(), counts))
        return torch.sparse_coo_tensor(rows[None], sums, own.shape, check_invariants=False, is_coalesced=True)

    def _gather_rows(self, own: Tensor, counts: list[int]) -> Tensor:
        """Concatenate (n, ...) from each rank, where n may differ between ranks."""
        padding = own.new_zeros(max(counts) - len(own), *own.shape[1:])
        rows = self.gather(torch.cat([own, padding]).flatten()).view(self.size, max(counts), *own.shape[1:])
        return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)])

    def gather(self, own: Tensor) -> Tensor:
        """Gather (n,) from each rank, with equal n, into (ranks, n)."""
        rows = own.new_empty(self.size, own.numel())
        if own.device.type == "cpu":
            exchange([own] * self.size, rows.unbind(), self.group)
        else:
            all_gather(rows.view(-1), own, self.group)
        return rows

    def swap(self, rows: Tensor) -> Tensor:
        """Exchange rows (ranks, n), all-to-all: row r goes to rank r. Return the rows that this rank receives."""
        swapped = torch.empty_like(rows)
        if rows.device.type == "cpu":
            exchange(rows.unbind(), swapped.unbind(), self.group)
        else:
            dist.all_to_all_single(swapped, rows, group=self.group)
        return swapped


class Reduced(Future[Tensor]):
    event: Any = None  # recorded after the call on the stream

    @during(Phase.COMMUNICATION)
    def wait(self) -> Tensor:
        return super().wait()

    def arrived(self) -> bool:
        """Return whether the result is ready. On a stream, `done` is true as soon as the call is enqueued."""
        return self.done() and (self.event is None or self.event.query())


class Background:
    """Runs calls one at a time, in order, in the background: on a thread (CPU) or a stream (CUDA)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # High priority, because peers wait for communication, and nobody waits for a single kernel of a backward pass.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.failed: Exception | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reduce")

    def submit(self, call: Callable[..., Tensor], *args: Any) -> Reduced:
        """Start `call`. The future's `wait` raises its exception; on a stream, this function does."""
        if self.stream is None:
            done = Reduced()
            self.thread.submit(self._run, done, call, *args)
            return done
        done = Reduced(devices=[self.device])
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in args:
            if isinstance(tensor, Tensor):
                tensor.record_stream(self.stream)  # keeps the memory if the caller drops the tensor
        with torch.cuda.stream(self.stream):
            done.set_result(_noted(call, *args))  # enqueued, not finished: `wait` makes the waiting stream wait
            done.event = self.stream.record_event()
        return done

    def _run(self, done: Reduced, call: Callable[..., Tensor], *args: Any) -> None:
        try:
            if self.failed:
                raise self.failed  # peers are waiting for the failed call, so no later call may take its place
            result = _noted(call, *args)
        except Exception as error:
            self.failed = error
            done.set_exception(error)  # pyright: ignore[reportArgumentType] typed for one class only
        else:
            done.set_result(result)


def _noted(call: Callable[..., Tensor], *args: Any) -> Tensor:
    token = reducing.set(next((arg for arg in args if isinstance(arg, Bucket)), None))
    try:
        return call(*args)
    finally:
        reducing.reset(token)
