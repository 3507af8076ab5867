"""Reads a choice: the knobs of its callbacks with their defaults, and the ranks and samples that follow."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.callbacks.shard.assign import assign
from trainer.config.compose import CONF
from trainer.config.options import DataOptions, Options
from trainer.config.schema import option_parameters
from trainer.errors import ConfigError, nearest
from trainer.cost.collectives import Group, of_ranks
from trainer.cost.machine import Machine
from trainer.tools.cost_model.stages import parts_of_ranks
from trainer.cost.workload import Choice, Workload

MODELLED = frozenset({
    "activation_checkpoint", "auto_batch", "bucket", "grad_compress", "hierarchical", "local_sgd",
    "onebit_adam", "optimizer_in_backward", "overlap", "pipeline", "shard",
})  # fmt: skip
MONITORS = ("trainer.monitors.", "trainer.loggers.")  # whose time is in `Workload.other_s`
FREE = frozenset({"early_stop"})
FACTOR = "its factor on the passes is not measured, and is taken as 1"
WHY = {
    "compile": FACTOR,
    "ema": "its pass over the weights is not modelled",
    "nan_guard": "its checks and copies are not modelled",
    "swa": "its passes over the weights and over training data are not modelled",
    "hetero_batch": "ranks are taken as equal",
}
READ = frozenset({
    "batch", "micro_batch", "accumulate", "trainer.ddp.bucket_mib", "trainer.ddp.gradient_as_bucket_view",
    "trainer.precision", "data.workers",
})  # fmt: skip
ALGORITHMS = {"Ring": "ring", "Tree": "tree", "allreduce:Ring": "ring", "allreduce:Tree": "tree"}  # of nccl.algo
QUIET = ("trainer.checkpoint.", "trainer.max_", "trainer.log_", "trainer.validate_", "data.prefetch", "data.cache")


@dataclass(frozen=True)
class Setup:
    """A machine, a workload and a choice, with all knobs."""

    machine: Machine
    workload: Workload
    batch: int
    callbacks: Mapping[str, Mapping[str, Any]]  # every knob
    settings: Mapping[str, Any]
    unknown: tuple[str, ...]

    def knob(self, callback: str, name: str, default: Any = None) -> Any:
        """Return a knob; `default` without the callback."""
        return self.callbacks[callback][name] if callback in self.callbacks else default

    @property
    def stages(self) -> int:
        return self.knob("pipeline", "stages", 1)

    @functools.cached_property
    def stage_parts(self) -> Sequence[Sequence[int]]:
        """Return the parts of the model that each rank of a pipeline has; nothing if they are not known."""
        if self.stages == 1 or not self.workload.parts:
            return ()
        cut = self.knob("pipeline", "cut")
        given = None if isinstance(cut, str) else tuple(cut)
        return parts_of_ranks(self.workload.parts, self.stages, self.knob("pipeline", "schedule"), given)

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
        """Return the samples of a micro-batch. `auto_batch` takes the most that fits."""
        if micro := self.settings.get("micro_batch"):
            return min(micro, self.samples)
        return -(-self.samples // (self.settings.get("accumulate") or 1))

    @property
    def passes(self) -> int:
        """Return the micro-batches of a step."""
        return -(-self.samples // self.micro)

    @property
    def codec(self) -> str:
        return self.knob("grad_compress", "codec", "none")

    @property
    def algorithm(self) -> str:
        """Return the algorithm of an all-reduce; a ring if nothing chooses another."""
        return ALGORITHMS.get(str(self.settings.get("nccl.algo")), "ring")

    @property
    def copies(self) -> bool:
        """Return whether gradients are copied into buckets and back."""
        return not self.settings.get("trainer.ddp.gradient_as_bucket_view")

    @property
    def row_ranks(self) -> int:
        """Return the ranks that share each parameter's rows: 1 without stage 3 of `shard`."""
        if self.knob("shard", "stage") != 3:
            return 1
        hybrid = self.knob("shard", "hybrid")
        return self.data_ranks if not hybrid else self.group.per_node if hybrid is True else hybrid

    @functools.cached_property
    def stepped(self) -> float:
        """Return the share of the parameters that the fullest rank steps, and whose optimizer state it has."""
        if self.knob("shard", "stage", 3) == 3:
            return 1 / self.row_ranks
        sizes = [self.workload.parameters[i] for i in self.own]
        loads = [0] * self.data_ranks
        for size, rank in zip(sizes, assign(sizes, self.data_ranks), strict=True):
            loads[rank] += size
        return max(loads) / sum(sizes)

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


def read(machine: Machine, workload: Workload, choice: Choice, batch: int) -> Setup:
    """Check a choice against the YAMLs and options of this version, and take in its knobs.

    Raises:
        ConfigError: A callback of Echelon lacks a knob, a setting does not exist, or sizes do not divide.
    """
    unknown: list[str] = []
    callbacks = {name: knobs(name, given, unknown) for name, given in choice.callbacks.items()}
    for key, value in choice.settings.items():
        unknown += setting(key, value)
    codec = "sign" if "onebit_adam" in callbacks else callbacks.get("grad_compress", {}).get("codec")
    if codec and codec not in machine.codecs:
        unknown.append(f"codec {codec}: its cost is not measured, and is taken as 0")
    if precision := choice.settings.get("trainer.precision"):
        unknown.append(f"trainer.precision={precision}: {FACTOR}")
    if "pipeline" in callbacks and not workload.boundary_bytes:
        unknown.append("callbacks.pipeline: the bytes between two stages are not known, and are taken as 0")
    setup = Setup(machine, workload, batch, callbacks, choice.settings, tuple(unknown))
    if machine.ranks % setup.stages:
        raise ConfigError(f"callbacks.pipeline.stages={setup.stages}: does not divide {machine.ranks} rank(s)")
    if not workload.parameters or batch < 1:
        raise ConfigError(f"batch={batch}, {len(workload.parameters)} parameters: give at least one of each")
    return setup


@functools.cache
def defaults(callback: str) -> Mapping[str, Any] | None:
    """Return a callback's YAML, the knobs and `_target_`; None without one."""
    from omegaconf import OmegaConf

    path = CONF / "callbacks" / f"{callback}.yaml"
    if not path.is_file():
        return None
    found: Any = OmegaConf.to_container(OmegaConf.load(path))
    return found[callback]


def knobs(name: str, given: Mapping[str, Any], unknown: list[str]) -> Mapping[str, Any]:
    """Return all knobs of a callback; say in `unknown` if the model leaves the callback out."""
    known = defaults(name)
    if known is None:
        unknown.append(f"callbacks.{name}: is no callback of Echelon's, and is not modelled")
        return given
    for knob in given.keys() - known.keys():
        knobs_of = known.keys() - {"_target_"}
        raise ConfigError(f"callbacks.{name}.{knob}={given[knob]}: no such knob; {nearest(knob, knobs_of)}")
    if name not in MODELLED | FREE and not known["_target_"].startswith(MONITORS):
        unknown.append(f"callbacks.{name}: {WHY.get(name, 'its time is not modelled')}")
    return {**known, **given}


def setting(key: str, value: Any) -> list[str]:
    """Return what to say about a setting.

    Raises:
        ConfigError: There is no such key.
    """
    if key in READ or key.startswith(QUIET):
        return []
    if key.startswith("nccl."):
        return [] if key == "nccl.algo" and value in (None, *ALGORITHMS) else [f"{key}={value}: is not modelled"]
    if key not in settings_of():
        raise ConfigError(f"{key}={value}: no such setting; {nearest(key, settings_of())}")
    return [f"{key}={value}: its time is not modelled"]


@functools.cache
def settings_of() -> frozenset[str]:
    """Return the dotted keys of `trainer` and `data`."""
    keys = {*READ}
    for prefix, options in (("trainer", Options), ("data", DataOptions)):
        for name, known in option_parameters(options).items():
            inner = option_parameters(known.annotation) if hasattr(known.annotation, "__dataclass_fields__") else {}
            keys |= {f"{prefix}.{name}.{each}" for each in inner} or {f"{prefix}.{name}"}
    return frozenset(keys)
