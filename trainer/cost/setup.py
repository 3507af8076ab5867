"""A run as the cost model sees it: the machine, the work of a sample, and what each callback changes."""

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
    """The part of a codec that the model needs; `trainer.comm.codecs.base.Codec` has it."""

    @property
    def residual_copies(self) -> float:
        """Return the copies of the gradients that stay in memory from step to step."""
        ...

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]:
        """Return the collectives that reduce a bucket of parameters of these shapes."""
        ...

    def decodes(self, ranks: int) -> int:
        """Return the number of payloads of a bucket's size that each rank decodes."""
        ...


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    shapes: Shapes
    elements: int
    share: float  # of the backward pass, since the bucket before was ready
    first: int  # the smallest index of its parameters: the forward pass needs it then


class Passes(NamedTuple):
    """Seconds of the fullest rank's passes and optimizer in a step without communication."""

    before_s: float  # all but the last micro-batch
    forward_s: float  # of the last micro-batch
    backward_s: float  # of the last micro-batch
    optimizer_s: float

    @property
    def compute_s(self) -> float:
        return self.before_s + self.forward_s + self.backward_s


class StepCost(NamedTuple):
    """Seconds of a step, from the first forward pass to the optimizer's end, and the bytes that a rank sends."""

    seconds: float
    sent_bytes: float


class Held(NamedTuple):
    """Bytes that a rank holds in every step, apart from activations."""

    parameters: float
    gradients: float
    buckets: float  # DDP's, alongside the gradients
    state: float  # of the optimizer
    other: float = 0.0


@dataclass(frozen=True)
class Cost:
    """The change that a callback makes to the cost of a step; by default none.

    A callback whose effect is a number sets an attribute. One with its own communication or schedule has a subclass in
    its folder. `Callback.cost` returns the object.

    Attributes:
        left_out: The effect that the model leaves out, for `Prediction.unknown`.
        stages: Ranks that read the same samples.
        every: Steps between two synchronisations of the ranks.
        codec: Encodes buckets.
        codec_name: Name in `Machine.codecs` of the codec whose work the step has; empty without one.
        between_nodes: The codec encodes between nodes alone.
        two_levels: Buckets are reduced inside each node first.
        recomputes: Share of the blocks' forward pass that runs again in the backward pass.
        keeps: Share of the activations that stays in memory.
        copies: Further copies of the parameters in memory.
        ddp_buckets: The size of DDP's buckets matters.
        checkpoint_parts: Each rank writes a part of a checkpoint.
    """

    left_out: str = ""
    stages: int = 1
    every: int = 1
    codec: Coded | None = None
    codec_name: str = ""
    between_nodes: bool = False
    two_levels: bool = False
    recomputes: float = 0.0
    keeps: float = 1.0
    copies: float = 0.0
    ddp_buckets: bool = True
    checkpoint_parts: bool = False

    def unknown(self, setup: "Setup") -> Sequence[str]:
        """Return further lines for `Prediction.unknown`."""
        return ()

    def choose(self, setup: "Setup") -> "Setup":
        """Return the setup with what the callback chooses when a run starts, such as the micro-batch."""
        return setup

    def stage_parts(self, setup: "Setup") -> Sequence[Sequence[int]]:
        """Return the parts of the model on each rank of a pipeline; nothing if they are not known."""
        return ()

    def backward_factor(self) -> float:
        """Return how many times as long a backward pass takes."""
        return 1.0

    def row_ranks(self, setup: "Setup") -> int:
        """Return the number of ranks that share each parameter's rows."""
        return 1

    def stepped(self, setup: "Setup") -> float:
        """Return the share of the parameters that the fullest rank steps, and whose optimizer state it holds."""
        return 1.0

    def in_flight(self, setup: "Setup") -> float:
        """Return the number of micro-batches whose activations a rank holds."""
        return 1

    def bucket_mibs(self, setup: "Setup") -> Sequence[float]:
        """Return the sizes of buckets in the order of reduction, the last for all further ones; () if not set."""
        return ()

    def default_mibs(self, setup: "Setup") -> Sequence[float]:
        """Return the sizes of buckets if neither a callback nor a setting gives them; () for DDP's own."""
        return ()

    def reduce_s(self, setup: "Setup", run: Passes, buckets: Sequence[Bucket], jobs: Sequence[Job]) -> float | None:
        """Return the seconds of a step whose buckets are not reduced in DDP's way, with the optimizer's."""
        return None

    def step(self, setup: "Setup", run: Passes, codec: bool) -> StepCost | None:
        """Return the cost of a step that reduces no buckets in the backward pass, with or without a codec's work."""
        return None

    def added(self, setup: "Setup", run: Passes) -> StepCost:
        """Return what a step costs in addition."""
        return StepCost(0.0, 0.0)

    def hold(self, setup: "Setup", held: Held) -> Held:
        """Return the bytes that a rank holds with this callback."""
        return held


@dataclass(frozen=True)
class Setup:
    """A machine, a workload and a choice of callbacks and settings.

    Attributes:
        costs: The cost of each callback that the model knows, by name.
        unknown: Choices whose effect the model leaves out.
    """

    machine: Machine
    workload: Workload
    batch: int
    costs: Mapping[str, Cost]
    settings: Mapping[str, Any]
    unknown: tuple[str, ...] = ()

    @functools.cached_property
    def stages(self) -> int:
        return max((cost.stages for cost in self.costs.values()), default=1)

    @functools.cached_property
    def stage_parts(self) -> Sequence[Sequence[int]]:
        """Return the parts of the model that each rank of a pipeline has; nothing if they are not known."""
        return next(filter(None, (cost.stage_parts(self) for cost in self.costs.values())), ())

    @functools.cached_property
    def stage_share(self) -> float:
        """Return the share of the passes that the slowest rank of a pipeline has; even shares if none are measured."""
        parts = self.workload.parts
        loads = [sum(parts[i] for i in own) for own in self.stage_parts]
        return max(loads) / sum(parts) if loads else 1 / self.stages

    @property
    def data_ranks(self) -> int:
        return self.machine.ranks // self.stages

    @property
    def group(self) -> Group:
        """Return the ranks that average gradients: neighbours, also the replicas of a stage."""
        return of_ranks(self.data_ranks, self.machine)

    @property
    def samples(self) -> int:
        """Return the samples of the fullest rank in a step."""
        return -(-self.batch // self.data_ranks)

    @property
    def micro(self) -> int:
        """Return the samples of a micro-batch."""
        if micro := self.settings.get("micro_batch"):
            return min(micro, self.samples)
        return -(-self.samples // (self.settings.get("accumulate") or 1))

    @property
    def passes(self) -> int:
        """Return the micro-batches of a step."""
        return -(-self.samples // self.micro)

    @functools.cached_property
    def codec(self) -> Cost:
        """Return the cost of the callback that encodes buckets; without one, buckets are sent as they are."""
        return next((cost for cost in self.costs.values() if cost.codec), Cost())

    @property
    def encodes(self) -> bool:
        return any(cost.codec_name for cost in self.costs.values())

    @property
    def two_levels(self) -> bool:
        return any(cost.two_levels for cost in self.costs.values())

    @property
    def every(self) -> int:
        """Return the steps between two synchronisations of the ranks."""
        return max((cost.every for cost in self.costs.values()), default=1)

    @property
    def recomputed(self) -> float:
        """Return the share of the forward pass that runs again in the backward pass: of its blocks, if known."""
        share, parts = sum(cost.recomputes for cost in self.costs.values()), self.workload.parts
        return share * sum(parts[1:-1]) / sum(parts) if parts else share

    @property
    def keeps(self) -> float:
        """Return the share of the activations that stays in memory."""
        return math.prod(cost.keeps for cost in self.costs.values())

    @property
    def backward_factor(self) -> float:
        return math.prod(cost.backward_factor() for cost in self.costs.values())

    @property
    def algorithm(self) -> str:
        """Return the algorithm of an all-reduce; a ring if nothing chooses another."""
        return ALGORITHMS.get(str(self.settings.get("nccl.algo")), "ring")

    @property
    def copies(self) -> bool:
        """Return whether gradients are copied into buckets and back."""
        return not self.settings.get("trainer.ddp.gradient_as_bucket_view")

    @functools.cached_property
    def row_ranks(self) -> int:
        """Return the number of ranks that share each parameter's rows."""
        return max((cost.row_ranks(self) for cost in self.costs.values()), default=1)

    @functools.cached_property
    def stepped(self) -> float:
        """Return the share of the parameters that the fullest rank steps, and whose optimizer state it holds."""
        return min((cost.stepped(self) for cost in self.costs.values()), default=1.0)

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """Return the indices of a rank's parameters: all, or those of the fullest rank of a pipeline.

        Without measured parts, stages have even parts of the parameters.
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
        """Return the bytes of a rank's gradients, in float32."""
        return 4 * sum(self.workload.parameters[i] for i in self.own)

    @property
    def optimizer_bytes(self) -> float:
        """Return the bytes of a rank's optimizer state, before it is sharded."""
        share = self.gradient_bytes / (4 * sum(self.workload.parameters))
        return max(0.0, share * self.workload.state_bytes - 2 * self.gradient_bytes)
