"""The typed settings of a run: the keys `trainer`, `trainer.checkpoint`, `trainer.ddp` and `data`. Imports no torch."""

from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from trainer.annotated import (
    AtLeast,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveOrInfinite,
    check_fields,
    check_names,
)
from trainer.config.duration import Duration
from trainer.errors import ConfigError, nearest
from trainer.other_words import now_compared
from trainer.process.environment import node_range

# Settings and data that a resume compares.
ACCEPTABLE = ("seed", "batch", "data", "callbacks", "shuffle_shards", "shuffle_window", "optimizer")


@check_names("trainer.checkpoint.")
@dataclass(frozen=True)
class CheckpointOptions:
    """`dir` contains one folder per run, and links: `last.pt` to the newest checkpoint, `best.pt` to the best."""

    dir: LocalPath = "ckpt"
    every: Literal["auto"] | None = None  # auto: by measured stall and failures, instead of the next two
    every_steps: PositiveInt | None = 1000
    every_minutes: PositiveOrInfinite | None = 30.0  # by rank 0's clock
    keep: Annotated[int, AtLeast(2)] = 2  # newest valid checkpoints kept; the newest may turn out to be damaged
    keep_best: str | None = None  # a metric, smaller is better: "val/loss"; "max val/accuracy" reverses that
    keep_every: PositiveInt | None = None  # steps; checkpoints at multiples of it are never deleted
    when_busy: Literal["wait", "skip"] = "wait"  # if a checkpoint is due while the one before is being written
    max_failures: PositiveInt = 3  # in a row, until the run stops

    def __post_init__(self) -> None:
        check_fields(self, "trainer.checkpoint.")
        if self.keep_best is not None and not self.keep_best.removeprefix("max ").strip():
            raise ConfigError(
                f"trainer.checkpoint.keep_best={self.keep_best}: names no metric; give one, as val/loss or "
                "'max val/accuracy', or null"
            )


@check_names("trainer.ddp.")
@dataclass(frozen=True)
class DDPOptions:
    """Arguments of torch's DistributedDataParallel, with torch's names except for the unit."""

    bucket_mib: PositiveFloat | None = None  # null: torch's 25, after a first bucket of 1
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool | None = None  # null: on CUDA, where it saves a copy of the gradients

    def __post_init__(self) -> None:
        check_fields(self, "trainer.ddp.")

    def arguments(self, cuda: bool) -> dict[str, Any]:
        """Return the keywords of DistributedDataParallel."""
        values = asdict(self)
        view = cuda if self.gradient_as_bucket_view is None else self.gradient_as_bucket_view
        return {"bucket_cap_mb": values.pop("bucket_mib"), **values, "gradient_as_bucket_view": view}


@check_names("trainer.limit_batches.")
@dataclass(frozen=True)
class LimitOptions:
    """The number of first batches of the data to use, of `batch` samples each; null: all."""

    train: PositiveInt | None = None  # an epoch has so many batches
    validation: PositiveInt | None = None  # of each data set; of an iterable: its own batches on each rank

    def __post_init__(self) -> None:
        check_fields(self, "trainer.limit_batches.")


@check_names("data.")
@dataclass(frozen=True)
class DataOptions:
    workers: NonNegativeInt = 2  # processes per rank; 0 reads in the training process
    prefetch: PositiveInt = 2  # micro-batches ahead per worker; all workers together load 1.5 steps ahead
    shuffle_shards: PositiveInt = 64  # shards mixed in every batch; part of the run's identity
    shuffle_window: PositiveInt = 512  # consecutive samples shuffled together; part of the run's identity
    shuffle_buffer: NonNegativeInt = 0  # samples of a stream from which the next is drawn; part of the run's identity
    decoders: list[Any] = field(default_factory=list)  # functions (".seg.png", bytes) -> value, or None: the next one's
    map: list[Any] = field(default_factory=list)  # functions sample -> sample, one after the other, before `transform`
    # Share of an epoch's samples that may be unreadable, 10 at least; 0: none.
    max_bad: NonNegativeFloat = 1e-4
    allow_pipe: bool = False  # whether a shard may be pipe:PROGRAM ARGUMENTS, which is run without a shell
    cache_dir: LocalPath = "~/.cache/echelon/shards"  # echelon-shards in it has downloaded and unpacked shards
    # Size of the cache; the least recently used shards are deleted, shards in use stay.
    cache_gb: PositiveFloat = 50.0

    def __post_init__(self) -> None:
        check_fields(self, "data.")


@check_names("trainer.")
@dataclass(frozen=True)
class Options:
    """Everything under `trainer`."""

    devices: PositiveInt | Literal["auto"] = "auto"  # ranks on this node; auto: every GPU, or one CPU process
    nodes: int | str = 1  # or MIN:MAX under torchrun, whose nodes may come and go
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    affinity: Literal["auto", "none"] = "auto"  # auto: a rank has cores of its GPU's NUMA node to itself
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "bf16_params"] = "auto"
    master_weights: bool = True  # false: with bf16_params, weights in bf16 alone, which steps round stochastically
    deterministic: bool = False  # GPU kernels that give the same bits every time; an error if an operation has none
    max_steps: NonNegativeInt | None = None  # 0: with init_from, whose weights are validated and saved
    max_epochs: NonNegativeFloat | None = None
    clip_norm: PositiveOrInfinite | None = None  # global norm; null or infinity does not clip
    clip_value: PositiveOrInfinite | None = None  # magnitude of each element; null does not clip
    sync_batch_norm: bool = False  # BatchNorm in training has the mean and variance of all ranks' samples; on GPUs
    validate_every: int | str | None = None  # a duration; null: at the end only
    limit_batches: LimitOptions = field(default_factory=LimitOptions)
    overfit: PositiveInt | None = None  # trains and validates on the first so many batches of the training data
    dry_run: bool = False  # two steps and a validation of two batches, of which no file stays
    log_every_steps: PositiveInt = 50
    seed: NonNegativeInt = 0
    resume: LocalPath | None = None  # ckpt/last.pt, ckpt/best.pt, a checkpoint, a run, or auto
    accept: list[str] = field(default_factory=list)  # differences from the checkpoint that a resume may take
    init_from: LocalPath | None = None  # weights only: a checkpoint, a file, a Hugging Face folder
    run_dir: LocalPath | None = None  # null: runs/<recipe>-<time>
    # Of a collective, of a data worker; after twice that without a step, the run ends.
    timeout_s: PositiveFloat = 600.0
    restarts: NonNegativeInt = 3  # after failures without progress; only of ranks that Echelon itself starts
    check_replicas_every: PositiveInt | None = 1000  # steps; checks that all ranks have the same weights
    allow_targets: list[str] = field(default_factory=list)  # packages, in addition to Echelon's, that _target_ may name
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    ddp: DDPOptions = field(default_factory=DDPOptions)

    def __post_init__(self) -> None:
        check_fields(self, "trainer.")
        node_range(self.nodes)
        for key in ("max_steps", "max_epochs"):
            if getattr(self, key) == 0 and self.init_from is None:
                raise ConfigError(
                    f"trainer.{key}=0: trains no step; give more, or trainer.init_from=WEIGHTS to save these"
                )
        if self.overfit is not None and self.limit_batches != LimitOptions():
            raise ConfigError(f"trainer.overfit={self.overfit}: has batches of its own; leave limit_batches out")
        for key in self.accept:
            if key not in ACCEPTABLE:
                now = now_compared(key)
                fix = nearest(key, ACCEPTABLE) if now == key else f"it is now {now}"
                raise ConfigError(f"trainer.accept=[{key}]: is not a setting that a resume compares; {fix}")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                f"trainer.clip_value={self.clip_value}: gradients are clipped by trainer.clip_norm={self.clip_norm} "
                "already; set one of the two to null"
            )
        if self.validate_every is not None and not Duration.parse(self.validate_every, "trainer.validate_every").amount:
            reason = "must be more than 0; give null to validate only at the end"
            raise ConfigError(f"trainer.validate_every={self.validate_every}: {reason}")

    def with_precision(self, label: str) -> "Options":
        """Return these options with the formats of all ranks, such as `fp32+bf16`, which a user can't set."""
        made = copy(self)
        object.__setattr__(made, "precision", label)
        return made
