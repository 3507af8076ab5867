"""The model in a pipeline of stages (Huang et al. 2018, arXiv:1811.06965), run by torch.distributed.pipelining."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from trainer.callbacks.pipeline.stages import KEY, StageGates, padded
from trainer.checkpoint.parts import read_all
from trainer.checkpoint.serialize import load_optimizer_state, optimizer_state
from trainer.checks.recipe import CheckedLoss
from trainer.comm.mesh import Mesh
from trainer.comm.phases import Phase, during, switch
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import Reduce
from trainer.data.batch import Split, Step
from trainer.errors import ConfigError
from trainer.parallel.forward_backward import weigh_loss
from trainer.parallel.layout import Layout, homes
from trainer.parallel.modes import evaluating
from trainer.parallel.placeholder import Placeholder
from trainer.parallel.reducer import Reducer
from trainer.parallel.strategy import Described, OutputElsewhere, own_names, trained, zero_loss
from trainer.rng import PIPELINE, generators_of, mix

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CLOSE = 1e-3  # relative tolerance; the loss in stages is bit-equal except for nondeterministic kernels

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


def pipeline_mesh(ranks: Ranks, stages: int) -> Mesh:
    """Return the mesh of stages x replicas, in which replicas are neighbours. A collective.

    Without replicas, the mesh only has the dimension of stages.
    """
    sizes = {"stage": stages, "data": ranks.world // stages}
    return Mesh(ranks, **{name: size for name, size in sizes.items() if size > 1})


class Exchange(NamedTuple):
    """The gradients of a tied parameter on two stages."""

    p: nn.Parameter
    stage: int  # the other stage
    own: Tensor
    other: Tensor
    works: list[Any]


class Pipeline(Described):
    """One or two stages of the model on each rank, and replicas of the whole pipeline.

    Gradients are reduced over a stage's replicas alongside the last backward passes. A tied parameter that two ranks
    have gets the sum of both gradients, which equals the unsplit model's up to rounding. Dropout is keyed by (seed,
    step, micro-batch, block).

    Args:
        holders: The stages that use each parameter, by name.
        split: The split of a step over the replicas. Messages have the rows of its largest micro-batch.
        reduce: The Reduce chain over a stage's replicas; None without replicas.
        expected: The unsplit model's loss on the first micro-batch without dropout; None if unknown.
    """

    whole, lockstep, syncing = False, True, True
    bucket_bytes = 0
    constant_buffers: frozenset[str] = frozenset()
    owned: Collection[Tensor] | None = None
    loss: CheckedLoss  # set by the callback

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        layout: Layout,
        holders: dict[str, list[int]],
        mesh: Mesh,
        *,
        split: Split,
        schedule: str,
        reduce: Reduce | None,
        expected: float | None,
        seed: int,
        step: Callable[[], int],
        device: torch.device,
    ) -> None:
        self.model, self.layout, self.holders, self.host = model, layout, holders, mesh.host
        self.stage, self.pipe, self.pipe_ranks = mesh.place["stage"], mesh.groups["stage"], mesh.line["stage"]
        self.data_rank, self.data_world = mesh.place.get("data", 0), mesh.sizes.get("data", 1)
        self.replicas = mesh.groups.get("data")
        self.parameters = trained(model)
        self.leaves: list[nn.Parameter] = self.parameters  # used by passes, which leave gradients in them
        self.micros, self.rows, self.schedule_name = split.micros(self.data_rank), split.micro, schedule
        self.reduce, self.expected, self.step, self.device = reduce, expected, step, device
        self.seed, self.generators = seed, generators_of(device)
        self.own = layout.of(self.stage)
        self.gates = StageGates(blocks, layout)
        self.full, self.training = model.forward, False
        model.forward = partial(self._forward, self.gates, self.full)
        self.schedule: Any = None
        self.pass_: Pass | None = None
        # The form of each stage's output, fixed once there is a schedule.
        self.metas: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
        self._lay_out(blocks)

    def _lay_out(self, blocks: Sequence[nn.Module]) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}  # for a tied parameter, its first name
        self.slots = {name: i for i, (name, stages) in enumerate(self.holders.items())}
        self.names = [names[id(p)] for p in self.parameters]
        passes = [self.micros * len(set(self.holders[name]) & set(self.own)) for name in self.names]
        self.reducer = Reducer(self.parameters, passes, self.reduce, self.names, self.device)
        # The first stage that has each entry in the model's state.
        modules = homes(self.model, blocks, self.layout)
        self.home = {key: modules[key.rpartition(".")[0]] for key in self.model.state_dict()}
        for key, p in self.model.named_parameters(remove_duplicate=False):
            self.home[key] = self.holders[names[id(p)]][0]
        self.tied: list[tuple[nn.Parameter, int]] = []  # each with the other rank that has it
        self.first_holder: list[bool] = []  # whether this rank is the first to have each parameter
        for p, name in zip(self.parameters, self.names, strict=True):
            ranks = sorted({self.layout.rank(stage) for stage in self.holders[name]})
            self.first_holder.append(ranks[0] == self.stage)
            self.tied += [(p, rank) for rank in ranks if rank != self.stage]

    # The methods of a strategy.
    def sync_gradients(self, on: bool) -> None:
        self.syncing = on

    def share_buffers(self) -> None:
        raise NotImplementedError("a schedule's passes always reduce")

    reduce_gradients = share_buffers

    def zero_loss(self, run: Callable[[], Tensor]) -> Tensor:
        raise NotImplementedError("a schedule's passes weigh their losses themselves")

    def copy(self) -> nn.Module:
        modules, inner = [self.model, *self.gates.blocks], [self.full, *self.gates.inner]
        gated = [module.forward for module in modules]
        set_forwards(modules, inner)  # gates hold process groups, which can't be copied
        try:
            model, blocks = deepcopy((self.model, self.gates.blocks))
        finally:
            set_forwards(modules, gated)
        model.forward = partial(self._forward, StageGates(blocks, self.layout), model.forward)
        return model

    def buckets(self) -> list[list[int]]:
        return [list(bucket) for bucket in self.reducer.buckets]

    def drain(self) -> None:
        """Finish passes of earlier steps. A synchronous schedule has none."""

    def pending(self) -> dict[str, Any]:
        """Return this rank's part of the gradients that no step has applied."""
        return {}

    def load_pending(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a step has taken all gradients")

    def unwrap(self) -> None:
        """Release the parameters. No rank can run the model alone."""
        self.reducer.close()

    def save(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return the tensors whose first stage is on this rank. The first replica saves them, except owned state."""
        state = {} if self.data_rank else self.model.state_dict()
        model = {key: value for key, value in state.items() if self.home[key] in self.own}
        stepped = own_names(self.model, [] if self.owned is None and self.data_rank else self.owned)
        moments = optimizer_state(optimizer, self.model).items()
        found = {name: value for name, value in moments if name in stepped and self.home[name] in self.own}
        return {"model": model, "optimizer": found}

    def own_part(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return the entries of this rank's stages in a callback's state that mirrors the model's, like an average."""
        return self._own_entries(state) if self._has_average(state) else None

    def _has_average(self, state: Any) -> bool:
        inner = isinstance(state, dict) and any(map(self._has_average, state.values()))
        return inner or (isinstance(state, dict) and state.keys() == self.home.keys())

    def _own_entries(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of nested dicts. The first rank gets everything that belongs to no stage."""
        first = not (self.data_rank or self.stage)
        if state.keys() == self.home.keys():
            return {} if self.data_rank else {k: v for k, v in state.items() if self.home[k] in self.own}
        return {
            key: self._own_entries(value) if self._has_average(value) else value
            for key, value in state.items()
            if first or self._has_average(value)
        }

    def load(self, optimizer: Optimizer, sections: Mapping[str, Any]) -> None:
        absent = {n for n, p in self.model.named_parameters(remove_duplicate=False) if isinstance(p, Placeholder)}
        state = self.model.state_dict()
        self.model.load_state_dict(
            {key: state[key] if key in absent else read_all(sections["model"][key]) for key in state}
        )
        if "optimizer" in sections:
            states, stepped = sections["optimizer"], own_names(self.model, self.owned)
            own = {name: read_all(states[name]) if name in stepped else {} for name in self.names}
            load_optimizer_state(optimizer, self.model, own)

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> Tensor:
        """Clip by the global norm over all stages: the norm of the parameters' norms, in the order of the model."""
        norms = self._norms()
        dist.all_reduce(norms, group=self.pipe)
        return self._clip_to(norms, max_norm)

    def _norms(self) -> Tensor:
        """Return each parameter's gradient norm, with zeros for other ranks' parameters, so that a sum is exact."""
        norms = torch.zeros(len(self.slots), dtype=self.parameters[0].dtype, device=self.device)
        own = [
            (self.slots[name], p.grad)
            for p, name, first in zip(self.parameters, self.names, self.first_holder, strict=True)
            if first and p.grad is not None
        ]
        if own:
            values = torch._foreach_norm([grad for _, grad in own])
            norms[[slot for slot, _ in own]] = torch.stack(values).to(norms.dtype)
        return norms

    def _clip_to(self, norms: Tensor, max_norm: float | None) -> Tensor:
        total = torch.linalg.vector_norm(norms)
        if max_norm is not None:
            clip_grads_with_norm_(self.parameters, max_norm, total)
        return total

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Determine the shapes between stages in a first pass, build the schedule, and run it once."""
        run_pass()
        run_pass()

    # The passes of a step.
    def forward_backward(self, data: Step, total: Callable[[], int]) -> list[Tensor]:
        """Run the schedule and reduce the gradients; return the losses of all micro-batches on every rank."""
        self.pass_ = self._read(data, total)
        schedule = self.schedule or self._prepare(self.pass_.batches[0])
        arguments: dict[str, Any] = {}
        if self.layout.stages - 1 in self.own:
            arguments["target"] = torch.zeros(self.micros)  # unused: the batch contains the targets
        for part in self.parts:
            part.done = 0
        self.training, self.reducer.step = True, self.step()
        switch(Phase.BACKWARD)
        try:
            schedule.step(**arguments)
        except RuntimeError as error:  # raised by torch around a stage's own error
            raise error.__cause__ or error from None
        finally:
            self.training = False
        for stage in self.stages:
            stage.clear_runtime_states()
        losses = self._share(self.pass_.losses)
        self.pass_ = None
        self._reduce()
        return losses[: len(data.weights)]

    def _read(self, data: Step, total: Callable[[], int]) -> "Pass":
        batches, weights = [batch for batch, _ in data], list(data.weights)
        if len(batches) < self.micros:  # in the rehearsal
            batches, weights = batches * self.micros, weights * self.micros
        own = [weight * self.data_world for weight in weights[: self.micros]]
        return Pass(batches[: self.micros], own, total)

    @during(Phase.FORWARD)
    def run_stage(self, stage: int, micro: int, received: Tensor | None) -> Tensor:
        """Run a stage forward; return its output, or on the last stage the weighted loss, (1,)."""
        now = self.pass_
        assert now is not None
        run = partial(self.loss.compute, self.model, now.batches[micro])
        loss, stream = self.gates.run(stage, received, run, partial(self._seed, self.step(), micro))
        if stream is not None:
            stream = padded(stream, (self.rows, *self.metas[stage][0][1:]))
            return stream.clone() if stream._is_view() else stream  # zero-bubble schedules detach it in place
        if not now.weights[micro]:
            used = [p for p, name in zip(self.leaves, self.names, strict=True) if stage in self.holders[name]]
            loss = zero_loss([*used, *([] if received is None else [received])], False)  # only of this stage
        now.losses.append(loss.detach())
        return weigh_loss(loss, now.weights[micro], now.total()).reshape(1)

    def _seed(self, step: int, micro: int, part: int) -> None:
        """Seed the model's random numbers per part of the model, not per stage, so that a cut changes no bits."""
        key = mix(self.seed, PIPELINE, self.data_rank, step, micro, part)
        for generator in self.generators:
            generator.manual_seed(key)

    def _find_forms(self, batch: Any) -> None:
        """Run the stages one after another without gradients, for the shapes between them."""
        loss = math.inf
        mode = nullcontext() if self.expected is None else evaluating(self.model)
        with torch.no_grad(), mode, suppress(OutputElsewhere):
            loss = float(self.loss.loss(self.model, batch))
        last = self.pipe_ranks[self.layout.rank(self.layout.stages - 1)]
        dist.broadcast(found := torch.tensor([loss], dtype=torch.float64, device=self.device), last, group=self.pipe)
        self._refuse_other_loss(found.item())
        rows = max((shape[0] for shape, _ in self.metas.values()), default=0)
        self.rows = max(self.rows, rows)

    def _prepare(self, batch: Any) -> Any:
        self._find_forms(batch)
        self.parts = [Part(self, stage) for stage in self.own]
        self.stages = [
            pipelining.PipelineStage(
                part, part.stage, self.layout.stages, self.device, self._example(part.stage - 1),
                self._example(part.stage), group=self.pipe,
            )
            for part in self.parts
        ]  # fmt: skip
        make: Any = SCHEDULES[self.schedule_name]
        single = issubclass(make, pipelining.schedules.PipelineScheduleSingle)
        try:
            self.schedule = make(
                self.stages[0] if single else self.stages, self.micros, lambda out, _: out.sum(), scale_grads=False
            )
        except ValueError as error:
            raise ConfigError(
                f"{KEY}.schedule={self.schedule_name}: {' '.join(str(error).split())}; change accumulate, or use gpipe"
            ) from None
        return self.schedule

    def _refuse_other_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ConfigError(
                f"{KEY}: the loss of the first micro-batch is not finite in stages; unless it never is, a stage needs "
                "parameters of another one; leave pipeline out, name other recipe.blocks(), or define parameters ahead "
                "of the blocks in the model if they are used there"
            )
        if self.expected is not None and abs(loss - self.expected) > CLOSE * abs(self.expected):
            raise ConfigError(
                f"{KEY}: the loss of the first micro-batch is {loss:.6g} in stages and {self.expected:.6g} in one "
                "piece, so something passes by the blocks; leave pipeline out, or name other recipe.blocks()"
            )

    def _example(self, stage: int) -> Tensor | tuple[()]:
        """Return a tensor without memory in the form of the stage's output."""
        if stage < 0:
            return ()
        if stage == self.layout.stages - 1:
            return torch.empty(1, device="meta", requires_grad=True)
        shape, dtype = self.metas[stage]
        return torch.empty(self.rows, *shape[1:], dtype=dtype, device="meta", requires_grad=True)

    @torch.no_grad()
    def _share(self, losses: list[Tensor]) -> list[Tensor]:
        """Return the last stage's losses, as float64 scalars, on every rank of the pipeline."""
        values = self._values(losses)
        last = self.pipe_ranks[self.layout.rank(self.layout.stages - 1)]
        dist.broadcast(values, last, group=self.pipe)
        return list(values.unbind())

    def _values(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.full((self.micros,), math.nan, dtype=torch.float64, device=self.device)
        return torch.stack([loss.reshape(()).double() for loss in losses])

    @torch.no_grad()
    def _reduce(self) -> None:
        """Average the gradients over the replicas of a stage; then add those of tied parameters over two stages.

        The sum comes last: replicas of one stage have the same bits, and a sum of two has the same bits on both sides.
        """
        self.reducer.finish()
        for p, rank in self.tied:
            self._add([self._exchange(p, rank)])

    def _exchange(self, p: nn.Parameter, stage: int) -> Exchange:
        own = (torch.zeros_like(p) if p.grad is None else p.grad).contiguous()
        other, peer = torch.empty_like(own), self.pipe_ranks[stage]
        both = (dist.isend, own), (dist.irecv, other)
        works = dist.batch_isend_irecv([dist.P2POp(op, t, peer, self.pipe) for op, t in both])
        return Exchange(p, stage, own, other, works)

    def _add(self, exchanges: list[Exchange]) -> None:
        for exchange in exchanges:
            for work in exchange.works:
                work.wait()
            exchange.p.grad = exchange.own + exchange.other

    # Forward passes without backward passes: validation, and the rehearsal's first pass.
    def _forward(self, gates: StageGates, full: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return full(*args, **kwargs)
        if torch.is_grad_enabled():
            raise ConfigError(f"{KEY}: the model runs forward in training through recipe.loss alone; call it there")
        stream: Tensor | None = None
        output: Any = None
        for stage in self.own:
            received = self._receive(stage - 1, stream) if stage else None
            output, stream = gates.run(stage, received, partial(full, *args, **kwargs))
            if stream is not None and self.layout.rank(stage + 1) != self.stage:
                self._send(stage, stream.contiguous())
        if self.layout.stages - 1 not in self.own:
            raise OutputElsewhere
        return output

    def _send(self, stage: int, stream: Tensor) -> None:
        """Send the stage's output, after a header on the host: its type and shape."""
        self._note(stage, stream)
        peer = self.pipe_ranks[self.layout.rank(stage + 1)]
        header = torch.zeros(10, dtype=torch.int64)
        header[: 2 + stream.dim()] = torch.tensor([DTYPES.index(stream.dtype), stream.dim(), *stream.shape])
        dist.send(header, peer, group=self.host)
        dist.send(stream, peer, group=self.pipe)

    def _receive(self, stage: int, local: Tensor | None) -> Tensor:
        if self.layout.rank(stage) == self.stage:
            assert local is not None
            self._note(stage, local)
            return local
        peer = self.pipe_ranks[self.layout.rank(stage)]
        dist.recv(header := torch.zeros(10, dtype=torch.int64), peer, group=self.host)
        kind, dims, *shape = header.tolist()
        stream = torch.empty(shape[:dims], dtype=DTYPES[kind], device=self.device)
        dist.recv(stream, peer, group=self.pipe)
        self._note(stage, stream)
        return stream

    def _note(self, stage: int, stream: Tensor) -> None:
        if self.schedule is None:
            self.metas[stage] = tuple(stream.shape), stream.dtype


def set_forwards(modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> None:
    for module, forward in zip(modules, forwards, strict=True):
        module.forward = forward


class Pass:
    """The micro-batches of a step, while the schedule runs."""

    def __init__(self, batches: list[Any], weights: list[int], total: Callable[[], int]) -> None:
        self.batches, self.weights, self.total = batches, weights, total
        self.losses: list[Tensor] = []


class Part(nn.Module):
    """A stage of the pipeline, as torch's schedules call it: micro-batch after micro-batch."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self.stage, self.done = stage, 0
        self.run = pipeline.run_stage
        names = {name for name, stages in pipeline.holders.items() if stage in stages}
        own = {n: p for n, p in pipeline.model.named_parameters() if n in names and p.requires_grad}
        for i, p in enumerate(own.values()):
            self.register_parameter(str(i), p)

    def forward(self, received: Tensor | None = None) -> Tensor:
        self.done += 1
        return self.run(self.stage, self.done - 1, received)
