"""A run as the cost model sees it: machine, workload, and the effect of each callback."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trainer.cost.collectives import Group, of_ranks
from trainer.cost.machine import CodecCost, Machine
from trainer.cost.messages import Message, Shapes
from trainer.cost.simulate import Job
from trainer.cost.workload import Workload

NO_COST = CodecCost(0.0, 0.0)
ALGORITHMS = {"Ring": "ring", "Tree": "tree", "allreduce:Ring": "ring", "allreduce:Tree": "tree"}  # of nccl.algo


class Coded(Protocol):
    """The part of `trainer.comm.codecs.base.Codec` that the model needs."""

    @property
    def residual_copies(self) -> float: ...  # copies of the gradients that stay in memory between steps

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]: ...  # that reduce a bucket of these shapes

    def decodes(self, ranks: int) -> int: ...  # the number of bucket-sized payloads that each rank decodes


class Bucket(NamedTuple):
    shapes: Shapes
    elements: int
    share: float  # of the backward pass, since the bucket before was ready
    first: int  # the smallest index of its parameters: the forward pass needs it then


class Passes(NamedTuple):
    """Seconds that the busiest rank spends on passes and optimizer in a step without communication."""

    before_s: float  # all but the last micro-batch
    forward_s: float  # of the last micro-batch
    backward_s: float  # of the last micro-batch
    optimizer_s: float

    @property
    def compute_s(self) -> float:
        return self.before_s + self.forward_s + self.backward_s


class StepCost(NamedTuple):
    """Seconds from the first forward pass to the end of the optimizer's step, and the bytes that a rank sends."""

    seconds: float
    sent_bytes: float


class Held(NamedTuple):
    """Bytes that a rank holds in every step, without activations."""

    parameters: float
    gradients: float
    buckets: float  # DDP's, alongside the gradients
    state: float  # of the optimizer
    other: float = 0.0


@dataclass(frozen=True)
class Cost:
    """A callback's effect on the cost of a step; none by default.

    If the effect is a number, the callback sets an attribute. If it has its own communication or schedule, it
    subclasses this in its folder. `Callback.cost` returns the object.
    """

    left_out: str = ""  # the effect that is not modelled, for `Prediction.unknown`
    stages: int = 1  # ranks that read the same samples
    every: int = 1  # steps between synchronisations of the ranks
    codec: Coded | None = None  # encodes buckets
    codec_name: str = ""  # key in `Machine.codecs` of the codec whose work the step includes; "" if none
    between_nodes: bool = False  # the codec encodes only between nodes
    two_levels: bool = False  # buckets are reduced within each node first
    recomputes: float = 0.0  # fraction of the blocks' forward pass that is recomputed in the backward pass
    keeps: float = 1.0  # fraction of the activations that stays in memory
    backward_factor: float = 1.0  # by which backward passes take longer
    copies: float = 0.0  # additional copies of the parameters in memory
    bucket_mibs: tuple[float, ...] = ()  # in the order of reduction, the last for all further buckets; () if not set
    ddp_buckets: bool = True  # DDP's bucket size has an effect
    checkpoint_parts: bool = False  # each rank writes a part of a checkpoint

    def unknown(self, setup: "Setup") -> Sequence[str]:
        """Return additional lines for `Prediction.unknown`."""
        return ()

    def choose(self, setup: "Setup") -> "Setup":
        """Return the setup with the values that the callback picks at the start, such as the micro-batch."""
        return setup

    def stage_parts(self, setup: "Setup") -> Sequence[Sequence[int]]:
        """Return which parts of the model each rank of a pipeline has; () if unknown."""
        return ()

    def row_ranks(self, setup: "Setup") -> int:
        """Return how many ranks share the rows of each parameter."""
        return 1

    def stepped(self, setup: "Setup") -> float:
        """Return the largest fraction of the parameters that one rank steps and keeps optimizer state for."""
        return 1.0

    def in_flight(self, setup: "Setup") -> float:
        """Return for how many micro-batches a rank holds activations."""
        return 1

    def default_mibs(self, setup: "Setup") -> Sequence[float]:
        """Return the bucket sizes if neither a callback nor a setting chooses them; () for DDP's own."""
        return ()

    def reduce_s(self, setup: "Setup", run: Passes, buckets: Sequence[Bucket], jobs: Sequence[Job]) -> float | None:
        """Return the seconds of a step, including the optimizer, if buckets are not reduced as DDP does."""
        return None

    def step(self, setup: "Setup", run: Passes, codec: bool) -> StepCost | None:
        """Return the cost of a step that reduces nothing in the backward pass. `codec` includes the codec's work."""
        return None

    def added(self, setup: "Setup", run: Passes) -> StepCost:
        """Return the additional cost of a step."""
        return StepCost(0.0, 0.0)

    def hold(self, setup: "Setup", held: Held) -> Held:
        return held


@dataclass(frozen=True)
class Setup:
    """A machine and a workload with the chosen callbacks and settings."""

    machine: Machine
    workload: Workload
    batch: int
    costs: Mapping[str, Cost]  # of the callbacks that are modelled, by name
    settings: Mapping[str, Any]
    unknown: tuple[str, ...] = ()  # choices whose effect is not modelled

    @functools.cached_property
    def stages(self) -> int:
        return max((cost.stages for cost in self.costs.values()), default=1)

    @functools.cached_property
    def stage_parts(self) -> Sequence[Sequence[int]]:
        return next(filter(None, (cost.stage_parts(self) for cost in self.costs.values())), ())

    @functools.cached_property
    def stage_share(self) -> float:
        """The slowest pipeline rank's fraction of the passes; even fractions if nothing was measured."""
        parts = self.workload.parts
        loads = [sum(parts[i] for i in own) for own in self.stage_parts]
        return max(loads) / sum(parts) if loads else 1 / self.stages

    @property
    def data_ranks(self) -> int:
        return self.machine.ranks // self.stages

    @property
    def group(self) -> Group:
        """The ranks that average gradients, such as a stage's replicas; they are neighbours."""
        return of_ranks(self.data_ranks, self.machine)

    @property
    def samples(self) -> int:
        """Samples per step on the fullest rank."""
        return -(-self.batch // self.data_ranks)

    @property
    def micro(self) -> int:
        """Samples per micro-batch."""
        if micro := self.settings.get("micro_batch"):
            return min(micro, self.samples)
        return -(-self.samples // (self.settings.get("accumulate") or 1))

    @property
    def passes(self) -> int:
        """Micro-batches per step."""
        return -(-self.samples // self.micro)

    @functools.cached_property
    def codec(self) -> Cost:
        """The cost of the callback that encodes buckets, or the default without one."""
        return next((cost for cost in self.costs.values() if cost.codec), Cost())

    @property
    def encodes(self) -> bool:
        return any(cost.codec_name for cost in self.costs.values())

    @property
    def two_levels(self) -> bool:
        return any(cost.two_levels for cost in self.costs.values())

    @property
    def every(self) -> int:
        return max((cost.every for cost in self.costs.values()), default=1)

    @property
    def recomputed(self) -> float:
        """Fraction of the forward pass that runs again in the backward pass; only of the blocks, if these are known."""
        share, parts = sum(cost.recomputes for cost in self.costs.values()), self.workload.parts
        return share * sum(parts[1:-1]) / sum(parts) if parts else share

    @property
    def keeps(self) -> float:
        return math.prod(cost.keeps for cost in self.costs.values())

    @property
    def backward_factor(self) -> float:
        return math.prod(cost.backward_factor for cost in self.costs.values())

    @property
    def algorithm(self) -> str:
        return ALGORITHMS.get(str(self.settings.get("nccl.algo")), "ring")

    @property
    def copies(self) -> bool:
        """Whether gradients are copied into buckets and back."""
        return not self.settings.get("trainer.ddp.gradient_as_bucket_view")

    @functools.cached_property
    def row_ranks(self) -> int:
        return max((cost.row_ranks(self) for cost in self.costs.values()), default=1)

    @functools.cached_property
    def stepped(self) -> float:
        return min((cost.stepped(self) for cost in self.costs.values()), default=1.0)

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """The indices of a rank's parameters; on a pipeline's fullest rank, which has an even part if nothing was
        measured.
        """
        sizes, part_of = self.workload.parameters, self.workload.part_of
        if self.stage_parts and part_of:
            held = [tuple(i for i, part in enumerate(part_of) if part in own) for own in self.stage_parts]
            return max(held, key=lambda indices: sum(sizes[i] for i in indices))
        parts, before, total = [list[int]() for _ in range(self.stages)], 0, sum(sizes)
        for index, size in enumerate(sizes):
            parts[min(self.stages - 1, int(self.stages * (before + size / 2) / total))].append(index)
            before += size
        return tuple(max(parts, key=lambda part: sum(sizes[i] for i in part)))

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a rank's gradients in float32."""
        return 4 * sum(self.workload.parameters[i] for i in self.own)

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of a rank's optimizer state before sharding."""
        share = self.gradient_bytes / (4 * sum(self.workload.parameters))
        return max(0.0, share * self.workload.state_bytes - 2 * self.gradient_bytes)
