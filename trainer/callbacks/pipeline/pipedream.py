"""A pipeline that never empties between steps: PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503)."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.callbacks.pipeline.stages import KEY
from trainer.callbacks.pipeline.strategy import Exchange, Pipeline
from trainer.callbacks.pipeline.weight_versions import Version, WeightVersions
from trainer.comm.phases import Phase, switch
from trainer.comm.ranks import Ranks
from trainer.data.batch import Step
from trainer.errors import ConfigError

Form = tuple[tuple[int, ...], torch.dtype]
Links = list[list[dist.ProcessGroup]]  # [even or odd earlier stage][outputs or their gradients]


def open_links(ranks: Ranks, pipes: list[list[int]]) -> Links:
    """Create a process group for each direction of the links between stages. A collective.

    NCCL runs the messages of a group in sequence. With separate groups, a message never waits for one to another
    neighbour or in the other direction, which could cause a deadlock. `pipes` has the ranks of each pipeline, in the
    order of its stages.
    """
    links: Links = []
    for odd in (0, 1):
        parts = [[pipe[:odd], *(pipe[i : i + 2] for i in range(odd, len(pipe), 2))] for pipe in pipes]
        pairs = [part for pipe in parts for part in pipe if part]
        links.append([ranks.new_groups(pairs) for _ in range(2)])
    return links


class Flight(NamedTuple):
    """A micro-batch whose backward pass has not run on this stage."""

    version: Version
    received: Tensor | None  # the stage's input; None on the first
    out: Tensor  # the stage's output; on the last stage, the weighted loss


class Inbox:
    """Messages of one shape from a neighbour. Receives are posted ahead, so that they overlap with the passes."""

    def __init__(self, peer: int, group: dist.ProcessGroup, form: Form, device: torch.device) -> None:
        self.peer, self.group, self.form, self.device = peer, group, form, device
        self.offered: deque[tuple[Tensor, Any]] = deque()

    def expect(self, count: int) -> None:
        """Post receives for `count` further messages."""
        shape, dtype = self.form
        for _ in range(count):
            message = torch.empty(shape, dtype=dtype, device=self.device)
            self.offered.append((message, dist.irecv(message, self.peer, group=self.group)))

    def take(self) -> Tensor:
        message, work = self.offered.popleft()
        work.wait()
        return message


class Outbox:
    def __init__(self, peer: int, group: dist.ProcessGroup) -> None:
        self.peer, self.group = peer, group
        self.sent: deque[tuple[Tensor, Any]] = deque()

    def send(self, message: Tensor) -> None:
        self.sent.append((message, dist.isend(message, self.peer, group=self.group)))

    def settle(self, left: int) -> None:
        """Wait for all messages except the last `left`, which may still be in flight."""
        while len(self.sent) > left:
            _, work = self.sent.popleft()
            work.wait()


class Awaited(list[Tensor]):
    """Losses from the last stage, (micro-batches,) in float64. NaN until iterating or indexing waits for them."""

    def __init__(self, values: Tensor, work: Any) -> None:
        super().__init__(values.unbind())
        self.work = work

    def __iter__(self) -> Iterator[Tensor]:
        self.work.wait()
        return super().__iter__()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.work.wait()
        return super().__getitem__(index)


class PipeDream(Pipeline):
    """A stage whose passes continue across the end of a step, with two versions of its weights.

    A step runs the forward passes of its batch, and applies the gradients of the previous batch: W(t+1) = W(t) -
    step(gradient of batch t-1 at W(t-1)). With `run_ahead` = 1, stage s of S is S - 1 - s micro-batches behind with its
    backward passes, even at the end of a step. The first step has no gradients to apply, and the last batch's are never
    applied.

    `links` is the result of `open_links`. `rehearsing` returns whether the current passes will be discarded.
    """

    def __init__(self, *args: Any, links: Links, run_ahead: int, rehearsing: Callable[[], bool], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.links, self.rehearsing, self.last = links, rehearsing, self.layout.stages - 1
        self.behind = run_ahead * (self.last - self.stage)
        self.versions = WeightVersions(self.model, self.parameters)
        self.flights: deque[Flight] = deque()
        self.before: Version | None = None  # the previous batch's, until its gradients are reduced
        self.norms: tuple[Tensor, Any] | None = None  # gradient norms of the parameters, and their sum over stages
        self.adding: list[Exchange] = []  # exchanges of tied parameters' gradients with earlier stages

    def forward_backward(self, data: Step, total: Callable[[], int]) -> list[Tensor]:
        """Run the batch's forward passes and as many backward passes; return the losses of all micro-batches.

        Afterwards the parameters have the gradients of the previous batch.
        """
        self.pass_ = self._read(data, total)
        if self.schedule is None:
            self._connect(self.pass_.batches[0])
        self.norms, version = None, Version(self.parameters)
        switch(Phase.BACKWARD)
        self._expect(self.micros)
        self._settle()
        try:
            for micro in range(self.micros):
                self._run_forward(micro, version)
                if len(self.flights) > self.behind:
                    self._run_backward()
                    self._settle()
        finally:
            self.versions.use(self.parameters)
        losses = self._send_losses(self.pass_.losses)
        self.pass_, self.before = None, version
        if self.rehearsing():
            self._end_rehearsal()
            return losses[: len(data.weights)]
        if self.flights:
            self.versions.part(version)
        self._end(left=self.micros)
        return losses

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> Tensor:
        """Clip as the other schedules do. The norms were sent when the backward passes ended."""
        if self.norms is None:  # the first step
            return torch.zeros((), dtype=self.parameters[0].dtype, device=self.device)
        norms, work = self.norms
        work.wait()
        return self._clip_to(norms, max_norm)

    def drain(self) -> None:
        """Run the outstanding backward passes. They use their own weight version, so the timing changes no bits."""
        try:
            while self.flights:
                self._run_backward()
        finally:
            self.versions.use(self.parameters)

    def pending(self) -> dict[str, Any]:
        """Return the gradients of the last batch, which the next step applies. Call `drain` first."""
        assert not self.flights
        if self.before is None:
            return {}
        named = zip(self.names, self.before.leaves, strict=True)
        gradients = {name: leaf.grad for name, leaf in named if leaf.grad is not None}
        return {"starts": list(self.layout.starts), "gradients": gradients}

    def load_pending(self, state: dict[str, Any]) -> None:
        self.before = Version(self.parameters)
        for name, leaf in zip(self.names, self.before.leaves, strict=True):
            if name in state["gradients"]:
                leaf.grad = state["gradients"][name].to(leaf)

    def _connect(self, batch: Any) -> None:
        """Determine the shapes of messages, and create the inboxes and outboxes for both neighbours."""
        self._find_forms(batch)
        self.receives: list[Inbox] = []
        self.sends: list[Outbox] = []
        stage = self.stage
        if stage:
            outputs, gradients = self.links[(stage - 1) % 2]
            before, form = self.pipe_ranks[stage - 1], self._form(stage - 1)
            self.inputs, self.input_gradients = Inbox(before, outputs, form, self.device), Outbox(before, gradients)
            self.receives.append(self.inputs)
            self.sends.append(self.input_gradients)
        if stage < self.last:
            outputs, gradients = self.links[stage % 2]
            after = self.pipe_ranks[stage + 1]
            self.outputs = Outbox(after, outputs)
            self.output_gradients = Inbox(after, gradients, self._form(stage), self.device)
            self.receives.append(self.output_gradients)
            self.sends.append(self.outputs)
        self.schedule = self.schedule_name

    def _form(self, stage: int) -> Form:
        shape, dtype = self.metas[stage]
        return (self.rows, *shape[1:]), dtype

    def _expect(self, count: int) -> None:
        for box in self.receives:
            box.expect(count)

    def _run_forward(self, micro: int, version: Version) -> None:
        self.versions.use(version.leaves)
        self.leaves = version.leaves
        received = self.inputs.take().requires_grad_() if self.stage else None
        self.training = True
        try:
            out = self.run_stage(self.stage, micro, received)
        finally:
            self.training = False
        if self.stage < self.last:
            self.outputs.send(out.detach())
        self.flights.append(Flight(version, received, out))

    def _run_backward(self) -> None:
        flight = self.flights.popleft()
        self.versions.use(flight.version.leaves)  # which a recomputation reads from the model
        gradient = self.output_gradients.take() if self.stage < self.last else None
        torch.autograd.backward(flight.out, gradient)
        if flight.received is not None:
            assert flight.received.grad is not None
            self.input_gradients.send(flight.received.grad.contiguous())

    @torch.no_grad()
    def _settle(self) -> None:
        """Reduce the previous batch's gradients, after its last backward pass on this stage.

        Stages get here at different times, and none waits for another: norms and the gradients of tied parameters are
        sent during later passes.
        """
        version = self.before
        if version is None or (self.flights and self.flights[0].version is version):
            return
        self.before = None
        self.versions.release(version)
        self.reducer.step = self.step()
        self.reducer.finish()
        exchanges = [self._exchange(p, rank) for p, rank in self.tied]
        # Later stages got here earlier, and the norm needs the sums.
        self._add([exchange for exchange in exchanges if exchange.stage > self.stage])
        self.adding = [exchange for exchange in exchanges if exchange.stage < self.stage]
        norms = self._norms()
        self.norms = norms, dist.all_reduce(norms, group=self.pipe, async_op=True)

    def _send_losses(self, losses: list[Tensor]) -> list[Tensor]:
        values, last = self._values(losses), self.pipe_ranks[self.last]
        return Awaited(values, dist.broadcast(values, last, group=self.pipe, async_op=True))

    def _end_rehearsal(self) -> None:
        """Drain the pipeline, and reduce the gradients, which will be discarded."""
        self.drain()
        if any(p.grad is not None for p in self.parameters):
            raise ConfigError(
                f"{KEY}.schedule=pipedream_2bw: the model keeps a parameter outside its module, where a second version "
                f"of it can't be; use {KEY}.schedule=1f1b, or take parameters from their modules in each forward pass"
            )
        self._settle()
        self._end(left=0)

    def _end(self, left: int) -> None:
        """Wait for older messages; the last `left` to each neighbour may still be in flight."""
        self._add(self.adding)
        self.adding = []
        for box in self.sends:
            box.settle(left)
