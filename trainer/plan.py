"""Plans a run: all decisions and checks that need no model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.annotated import called, fits
from trainer.callback import Callback
from trainer.checkpoint import locate
from trainer.checkpoint.interval import FIRST
from trainer.checkpoint.manifest import see, verify
from trainer.checkpoint.pretrained import weights_files
from trainer.checkpoint.retention import parse_best
from trainer.checks.plan import (
    PASS,
    identity_without_observers,
    refuse_differences,
    refuse_incomplete,
    refuse_more,
    refuse_no_functions,
    refuse_other_manifests,
    refuse_other_pass,
    refuse_other_ranks,
    refuse_other_recipe,
    refuse_unmerged,
    settings_in_common,
    stateful,
)
from trainer.composition import arrange
from trainer.config.batch import split_batch
from trainer.config.duration import Duration, Periods
from trainer.config.options import DataOptions, Options
from trainer.data.iterable import Iterated
from trainer.data.opening import in_turns, open_source, prepare_files, transform_of
from trainer.data.source import Samples, Source, by_prefix
from trainer.data.torch_loader import refuse_other_replicas
from trainer.errors import ConfigError, DataError
from trainer.log import log
from trainer.optim.schedule import Schedule, ShapedRate
from trainer.process.environment import Place, node_range


@dataclass(frozen=True)
class RunSpec:
    """The decisions of a run as plain values, made once for all ranks: by the launcher, or else by rank 0."""

    world: int
    checkpoint: list[str] | None  # the verified folder of the checkpoint to resume, and its manifest's sha256
    micro: int  # samples of the largest micro-batch
    accumulate: int
    max_steps: int | None
    identity: dict[str, Any]  # the settings and data that must be the same for an exact resume
    validation: str | None  # fingerprint of the validation data


class Plan:
    """A rank's callbacks in order, its data, and the decisions of the run.

    Args:
        options: The run's options, with the precision of all ranks if it is known.
        each: Gathers the values of all ranks on every rank.
        spec: The decisions, if a launcher made them. The rank then only compares them with its own view.

    Raises:
        ConfigError, DataError: A setting or the data can't work.
    """

    def __init__(
        self,
        recipe: Any,
        callbacks: Mapping[str, Callback],
        schedule: Schedule,
        *,
        batch: int,
        micro_batch: int | None,
        accumulate: int | None,
        options: Options,
        data: DataOptions,
        place: Place,
        each: Callable[[Any], list[Any]],
        spec: RunSpec | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        world = place.world
        if spec is None:
            refuse_more(options, world)
            same = asdict(options) | {"run_dir": None, "checkpoint": asdict(options.checkpoint) | {"dir": ""}}
            common = settings_in_common(settings, callbacks)
            refuse_other_ranks({f"trainer.{key}": value for key, value in same.items()} | common, each)
        self.options, self.data, self.batch = options, data, batch
        refuse_incomplete(recipe, callbacks)
        self.callbacks = arrange(callbacks, self.features())
        reads = place.rank > 0 and place.local_rank == 0
        self.resumed, self.manifest = self._see_checkpoint(self._find_checkpoint(place.rank, each, spec), each, reads)
        self.uneven = len(set(node_range(options.nodes))) > 1 or self.manifest.get("world", world) != world
        self.uneven |= self.manifest.get("uneven", False)  # also on the same number of ranks, to keep the split
        parts = (spec.micro, spec.accumulate) if spec else None
        data_world = split_over(self.callbacks, world)
        self.micro, self.accumulate = parts or split_batch(batch, data_world, micro_batch, accumulate, self.uneven)
        self.data_world, self.splits = data_world, not (spec or micro_batch or accumulate or hasattr(recipe, "weight"))
        if self.resumed and self.manifest["world"] != world:
            refuse_unmerged(self.callbacks, self.manifest, world)
        if options.init_from and not self.resumed:
            weights_files(options.init_from)
        refuse_no_functions(data)
        self._open_data(recipe, place, each, spec is not None)
        if self.order is None and spec is None:  # an iterable decides the size of its batches: no uneven split
            split_batch(batch, data_world, micro_batch, accumulate)
        self._set_time(schedule, spec)
        if self.resumed:
            self._compare(recipe, place)
        self.spec = self._agree(world, each, spec)

    def __repr__(self) -> str:
        return called(self, "batch", "micro", "accumulate", "max_steps", "epoch_samples")

    def _set_time(self, schedule: Schedule, spec: RunSpec | None) -> None:
        """Set the last step, the learning rates and the intervals."""
        if isinstance(schedule, type) or not hasattr(schedule, "resolve"):
            raise ConfigError(
                f"schedule={schedule}: is no schedule; give an object, as Cosine() of trainer.optim.schedule"
            )
        # The checkpoint's samples in steps of this batch size, minus its own steps: not 0 if the batch has changed.
        self.done = self.manifest if self.resumed else {"samples": 0, "step": 0}
        self.ahead = self.done["samples"] // self.batch - self.done["step"]
        before = self.manifest.get("identity", {}).get("batch")
        self.batch_before = before if fits(before, int) and before > 0 else self.batch
        self.max_steps = spec.max_steps if spec else self._last_step(self.options.max_steps, self.options.max_epochs)
        end = None if self.max_steps is None else self.max_steps + self.ahead
        self.rate = schedule.resolve(end, self.batch, self.epoch_samples)
        self._set_intervals()

    def _compare(self, recipe: Any, place: Place) -> None:
        """Refuse a checkpoint of another recipe, other data or other settings."""
        own, accept = self.identity(), self.options.accept
        refuse_other_recipe(recipe, self.manifest, own, accept)
        saved = identity_without_observers(self.manifest, self.callbacks)
        was, now = saved.get(PASS), own.pop(PASS, None)
        if place.rank == 0 and now and saved["data"] == own["data"] and was not in (None, now):
            refuse_other_pass(was, now, "data" in accept or self.manifest["world"] != place.world)
        refuse_differences(saved, own, accept)

    def _set_intervals(self) -> None:
        """Set the steps and seconds between validations and between checkpoints; infinity means never.

        With `trainer.checkpoint.every=auto`, the `Checkpointer` updates `save_s` after each checkpoint.
        """
        options = self.options
        key, given = "trainer.validate_every", options.validate_every
        self.validate_every = every = None if given is None else Duration.parse(given, key)
        timed = every is not None and every.unit == "minutes"
        self.validate_s = every.amount * 60 if every and timed else math.inf
        self.validations = self.periods(key, every) if every and not timed else None
        self.save_s = (options.checkpoint.every_minutes or math.inf) * 60
        self.save_steps = options.checkpoint.every_steps or math.inf
        if options.checkpoint.every:
            self.save_s, self.save_steps = FIRST, math.inf

    def _agree(self, world: int, each: Callable[[Any], list[Any]], spec: RunSpec | None) -> RunSpec:
        """Return the decisions of the launcher, or else of rank 0, after comparing them with this rank's view.

        Raises:
            ConfigError: Ranks see different settings or data.
            DataError: The data has changed since the launcher read it.
        """
        found = getattr(self.validation, "fingerprint", None)
        if spec is None:
            refuse_other_ranks(self.identity() | {"max_steps": self.max_steps, PASS: None}, each)
            checkpoint = [str(self.resumed), self.manifest["sha256"]] if self.resumed else None
            own = RunSpec(world, checkpoint, self.micro, self.accumulate, self.max_steps, self.identity(), found)
            return RunSpec(**each(asdict(own))[0])
        if (spec.identity["data"], spec.validation) != (self.identity()["data"], found):
            raise DataError("recipe.data: has changed since the run was planned; restore the data, then resume")
        return spec

    def _open_data(self, recipe: Any, place: Place, each: Callable[[Any], list[Any]], planned: bool) -> None:
        """Open the data, rank by rank. With `planned`, the launcher has already prepared the files of its node."""
        seed, timeout_s = self.options.seed, self.options.timeout_s

        def opens() -> list[Any]:
            prepare_files(recipe, seed, here=place.local_rank == 0 and (place.rank > 0 or not planned))
            return [open_source(recipe, split, seed, self.data, timeout_s) for split in ("train", "val")]

        source, self.validation = in_turns(place, each, opens)
        if source is None:
            raise ConfigError("recipe.data('train'): is None; return the data to train on")
        validation = {} if self.validation is None else by_prefix(self.validation, "val")
        for split, part in {"train": source, **validation}.items():
            refuse_other_replicas(part, split, place.rank % self.data_world, self.data_world)
        if self.splits and source.batch_size:
            self.micro, self.accumulate = split_by(
                source.batch_size, self.batch, self.data_world, resumed=bool(self.resumed)
            )
        self.source: Source = self._limit(source, recipe)
        self.order = self.source.order(self.data.shuffle_shards, self.data.shuffle_window)
        if self.validation is None and self.options.validate_every is not None:
            raise ConfigError(
                f"trainer.validate_every={self.options.validate_every}: recipe.data('val') is None; "
                "return validation data, or give trainer.validate_every=null"
            )
        if self.validation is None and self.watched:
            key, name = next(iter(self.watched.items()))
            raise ConfigError(
                f"{key}={name}: recipe.data('val') is None; return validation data, or leave this setting out"
            )
        batches = self.source.batches_in(self.data_world) if isinstance(self.source, Iterated) else None
        self.epoch_samples = self.order.samples if self.order else (batches or 0) * self.micro * self.data_world or None

    def _limit(self, source: Source, recipe: Any) -> Source:
        """Apply `limit_batches` or `overfit` to the validation data, and to the training data, which is returned."""
        few, limits = self.options.overfit, self.options.limit_batches
        if few is not None:
            if isinstance(source, Iterated):
                raise ConfigError(
                    f"trainer.overfit={few}: recipe.data('train') is an iterable, whose batches may differ each time "
                    "it is iterated over; give trainer.limit_batches.train instead, or return a Dataset"
                )
            source = source.first(few, self.batch, self.accumulate, "trainer.overfit")
            own = transform_of(recipe, self.data, validates=True)
            same = Samples(source.reader, source.counts, source.fingerprint, own, source.seed)
            self.validation = None if self.validation is None else same
            return source
        if self.validation is not None and limits.validation is not None:
            key = "trainer.limit_batches.validation"
            self.validation = self.validation.first(limits.validation, self.batch, 1, key)
        if limits.train is None:
            return source
        return source.first(limits.train, self.batch, self.accumulate, "trainer.limit_batches.train")

    @property
    def watched(self) -> dict[str, str]:
        """Return the validation metrics that settings name: config key -> metric."""
        watched = {f"callbacks.{name}.metric": c.metric for name, c in self.callbacks.items() if c.metric}
        if best := self.options.checkpoint.keep_best:
            watched["trainer.checkpoint.keep_best"] = parse_best(best)[0]
        return watched

    def features(self) -> set[str]:
        return features(self.options)

    def _find_checkpoint(self, rank: int, each: Callable[..., list[Any]], spec: RunSpec | None) -> list[str] | None:
        """Return the checkpoint that the launcher, or else rank 0, found, and its manifest's sha256.

        A restart asks for the newest checkpoint, so rank 0 looks for it again.
        """
        options = self.options
        if options.resume is None:
            return None
        if spec and options.resume != "auto":
            return spec.checkpoint
        root, found = Path(options.checkpoint.dir), None
        if rank == 0:
            path = locate.resolve(options.resume, root, root / Path(options.run_dir).name if options.run_dir else None)
            found = path and [str(path), verify(path, hashes=False)["sha256"]]
        found = each(found)[0]
        if found is None:
            if options.run_dir and rank == 0:
                locate.refuse_renamed(Path(options.run_dir), root)
            log.info("resume: there is no checkpoint in %s yet; a new run starts", root)
        return found

    def _see_checkpoint(
        self, found: list[str] | None, each: Callable[..., list[Any]], hashes: bool
    ) -> tuple[Path | None, dict[str, Any]]:
        """Read the manifest on all ranks. With `hashes`, this rank also verifies all files on behalf of its node.

        Raises:
            ConfigError: A rank does not see the checkpoint.
        """
        if found is None:
            return None, {}
        manifest, unseen = see(path := Path(found[0]), found[1], hashes)
        for number, why in enumerate(each(unseen)):
            if why:
                raise ConfigError(
                    f"trainer.resume={self.options.resume}: rank {number} does not see rank 0's checkpoint ({why}); "
                    "give all ranks the same trainer.checkpoint.dir, on a shared disk"
                )
        refuse_other_manifests(manifest, f"trainer.resume={path}")
        return path, manifest

    def _last_step(self, max_steps: int | None, max_epochs: float | None) -> int | None:
        limits = [] if max_steps is None else [max_steps]
        if max_epochs is not None:
            limits.append(self.step_after("trainer.max_epochs", Duration(max_epochs, "epochs")))
        return min(limits, default=None)

    def moved_rate(self, peak: float) -> str:
        """Describe how the next step's learning rate follows from a new limit of steps; "" if it does not."""
        rate, step = self.rate, self.done["step"] + self.ahead
        saved = [self.manifest.get("settings", {}).get(f"trainer.{name}") for name in ("max_steps", "max_epochs")]
        known = all(value is None or (fits(value, float) and 0 < value < math.inf) for value in saved)
        if not isinstance(rate, ShapedRate) or not known or not step or self.batch_before != self.batch:
            return ""
        try:
            end = self._last_step(*saved)
        except ConfigError:  # an epoch has no known length any more
            return ""
        was = rate if end is None else rate.ending(end + self.ahead)
        if was(step) == rate(step):
            return ""
        before, now = (f"{peak * factor:.3g}" for factor in (was(step - 1), rate(step)))
        return f"the learning rate goes from {before} to {now}: schedule={rate.name} now ends at step {self.max_steps}"

    def step_after(self, key: str, given: Any) -> int:
        """Return the step at which a duration from the run's start ends. Samples and epochs count those trained on.

        Raises:
            ConfigError: As of `Duration.steps`.
        """
        duration = Duration.parse(given, key)
        if duration.unit == "steps":
            return duration.steps(key, self.batch, self.epoch_samples)
        return self.step_at(duration.samples(key, self.batch, self.epoch_samples))

    def step_at(self, samples: Fraction) -> int:
        """Return the first step after which the run has trained on this many samples."""
        return self.done["step"] + math.ceil((samples - self.done["samples"]) / self.batch)

    def samples_at(self, step: int) -> int:
        """Return the samples trained on after a step. Steps before the resumed one count with their own batch."""
        ahead = step - self.done["step"]
        return self.done["samples"] + ahead * (self.batch if ahead > 0 else self.batch_before)

    def periods(self, key: str, given: Any, start: int | Fraction = 0) -> Periods:
        """Return the periods of a duration, counted in steps or in samples trained on.

        Args:
            start: The start of the first period, in the same unit.

        Raises:
            ConfigError: As of `Duration.steps`.
        """
        duration, begins = Duration.parse(given, key), Fraction(start)
        if duration.unit == "steps":
            return Periods(int, Fraction(duration.steps(key, self.batch, self.epoch_samples)), begins)
        return Periods(self.samples_at, duration.samples(key, self.batch, self.epoch_samples), begins)

    def validates_at(self, step: int) -> bool:
        """Return whether `validate_every` requests a validation after this step, the first to reach a multiple."""
        return self.validations is not None and self.validations.end_at(step)

    def next_validation(self, step: int) -> float:
        """Return the next step after which `validate_every` requests a validation; infinity for none."""
        if self.validations is None or self.validate_every is None:
            return math.inf
        end = self.validations.next_end(step)
        return math.ceil(end) if self.validate_every.unit == "steps" else self.step_at(end)

    def identity(self) -> dict[str, Any]:
        """Return the settings and the data that an exact resume must share."""
        own = {"seed": self.options.seed, "batch": self.batch, "data": self.source.fingerprint}
        own |= {"callbacks": stateful(self.callbacks)}
        own |= {"shuffle_shards": self.data.shuffle_shards, "shuffle_window": self.data.shuffle_window}
        return own if self.order or not self.epoch_samples else own | {PASS: self.epoch_samples}


def features(options: Options) -> set[str]:
    """Return the enabled features of the trainer, by their names in `Callback.conflicts`."""
    ddp = options.ddp
    on = {
        "clip": options.clip_norm is not None,
        "clip_value": options.clip_value is not None,
        "fp16": "fp16" in options.precision,  # on any rank
        "fp8": options.precision == "fp8",
        "bf16_params": options.precision == "bf16_params" and options.master_weights,
        "bf16_weights": not options.master_weights,
        "sync_batch_norm": options.sync_batch_norm,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
    }
    return {name for name, active in on.items() if active}


def split_over(callbacks: Mapping[str, Callback], world: int) -> int:
    """Return the number of ranks that read different samples.

    Raises:
        ConfigError: The number of a callback's stages does not divide the number of ranks.
    """
    for name, callback in callbacks.items():
        if world % callback.stages:
            divisors = [str(n) for n in range(2, world + 1) if world % n == 0]
            way_out = f"use {' or '.join(divisors)}" if divisors else f"leave {name} out"
            raise ConfigError(f"callbacks.{name}.stages={callback.stages}: does not divide {world} rank(s); {way_out}")
        world //= callback.stages
    return world


def split_by(size: int, batch: int, world: int, resumed: bool = False) -> tuple[int, int]:
    """Split a batch into the batches of an iterable, which have `size` samples each.

    A resumed run should keep its batch, so the message suggests another size for the iterable first.

    Raises:
        ConfigError: It does not divide.
    """
    if batch % (unit := size * world):
        low = batch // unit * unit
        several = " or ".join(f"batch={b}" for b in dict.fromkeys((unit, low, low + unit)) if b)
        own = "another batch_size" if batch % world else f"batch_size={batch // world}"  # which keeps the training
        ways = [f"set {several}", f"give the DataLoader {own}"]
        raise ConfigError(
            f"batch={batch}: recipe.data('train') yields batches of {size} samples on each of {world} rank(s); "
            + ", or ".join(reversed(ways) if resumed else ways)
        )
    return size, batch // unit
