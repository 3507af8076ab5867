"""A training step as the cost model sees it: the work, the configuration, and the prediction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One rank's work in any configuration, measured without communication. Fields with a default are optional."""

    parameters: tuple[int, ...]  # elements of each, in the model's order
    forward_s: float  # a sample
    backward_s: float  # a sample
    pass_s: float  # fixed, a micro-batch
    optimizer_s: float  # a step, of all parameters
    other_s: float  # fixed, a step: agreement, callbacks
    data_s: float  # a sample, one worker
    activation_bytes: float  # a sample, that autograd keeps
    state_bytes: float  # parameters, gradients and optimizer state
    shapes: tuple[tuple[int, ...], ...] = ()  # of the parameters; (): each is taken as a square matrix
    compute: tuple[float, ...] = ()  # share of each parameter in the backward pass; (): of elements, tables aside
    jitter: float = 0.0  # standard deviation of a rank's passes from step to step, of their mean
    data_cpu: float = 1.0  # share of `data_s` that keeps a core busy; the rest waits for a disk or a server
    boundary_bytes: float = 0.0  # a sample, between two blocks: what a pipeline's stages send
    parts: tuple[float, ...] = ()  # share of the passes before the blocks, of each, and after; (): stages are equal
    part_of: tuple[int, ...] = ()  # the part of each parameter; (): unknown
    tied_bytes: float = 0.0  # of parameters that are used before and after the blocks: by two stages of a pipeline


@dataclass(frozen=True)
class Choice:
    """Callbacks with the settings that differ from their YAML, and dotted config keys. A user's own callback has a
    `_target_`.
    """

    callbacks: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    allow: tuple[str, ...] = field(default=(), compare=False)  # packages that a callback's `_target_` may name

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", tuple(self.allow))  # a journal has a list


@dataclass(frozen=True)
class Prediction:
    """A predicted step. `unknown` names the choices whose effect is not modelled."""

    step_s: float
    parts: Mapping[str, float]  # data, compute, communication (exposed), codec, optimizer, other: sum to step_s
    sent_bytes: float  # of one rank, a step
    memory_bytes: float  # of one rank
    unknown: tuple[str, ...] = ()
