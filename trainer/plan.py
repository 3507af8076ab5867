"""Plans a run: the decisions and refusals that need no model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.annotated import called, checked, fits
from trainer.callback import Callback, Role, overrides
from trainer.checkpoint import locate
from trainer.checkpoint.interval import FIRST
from trainer.checkpoint.manifest import see, verify
from trainer.checkpoint.pretrained import weights_files
from trainer.checkpoint.retention import parse_best
from trainer.checks.callback import refuse_no_callback, refuse_other_hooks
from trainer.checks.recipe import refuse_other_parameters
from trainer.composition import arrange, kinds
from trainer.config.batch import split_batch
from trainer.config.duration import Duration, Periods
from trainer.config.options import DataOptions, Options
from trainer.config.targets import in_conf
from trainer.data.limit import FirstOf, first_batches, first_validation
from trainer.data.source import Samples, each_set, in_turns, open_source, prepare_files, transform_of
from trainer.data.torch_loader import batch_size_of, batches_in, refuse_other_replicas
from trainer.errors import ConfigError, DataError
from trainer.log import log
from trainer.optim.schedule import Schedule
from trainer.process.environment import Place, node_range

PASS = "epoch_samples"  # of batches; a rank's own iterable may have another number than rank 0's
MOST_RANKS = 1 << 20  # a manifest with more ranks is refused


@dataclass(frozen=True)
class RunSpec:
    """The decisions of a run as plain values: made once, by the launcher or else by rank 0, for all ranks."""

    world: int
    checkpoint: list[str] | None  # the verified folder of the checkpoint to resume, and its manifest's sha256
    micro: int  # samples of the largest micro-batch
    accumulate: int
    max_steps: int | None
    identity: dict[str, Any]  # the settings and data that must be the same for an exact resume
    validation: str | None  # fingerprint of the validation data


class Plan:
    """The callbacks of a rank in order, its data, and the decisions of the run.

    Args:
        options: The run's options, with the precision of all ranks if that is known.
        each: Returns on every rank the values of all ranks.
        spec: The decisions, if a launcher has made them. The rank then only compares its own view.

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
        self.uneven |= self.manifest.get("uneven", False)  # also on as many ranks as before: the same split
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
        """Set the last step, the rates and the intervals."""
        if isinstance(schedule, type) or not hasattr(schedule, "resolve"):
            raise ConfigError(
                f"schedule={schedule}: is no schedule; give an object, as Cosine() of trainer.optim.schedule"
            )
        # Steps of this batch that a checkpoint's samples make, less its own steps: not 0 if it had another batch.
        self.done = self.manifest if self.resumed else {"samples": 0, "step": 0}
        self.ahead = self.done["samples"] // self.batch - self.done["step"]
        before = self.manifest.get("identity", {}).get("batch")
        self.batch_before = before if fits(before, int) and before > 0 else self.batch
        self.max_steps = spec.max_steps if spec else self._max_steps()
        end = None if self.max_steps is None else self.max_steps + self.ahead
        self.rate = schedule.resolve(end, self.batch, self.epoch_samples)
        self._set_intervals()

    def _compare(self, recipe: Any, place: Place) -> None:
        """Refuse a checkpoint of another recipe, of other data or settings."""
        own, accept = self.identity(), self.options.accept
        refuse_other_recipe(recipe, self.manifest, own, accept)
        saved = identity_without_observers(self.manifest, self.callbacks)
        was, now = saved.get(PASS), own.pop(PASS, None)
        if place.rank == 0 and now and saved["data"] == own["data"] and was not in (None, now):
            refuse_other_pass(was, now, "data" in accept or self.manifest["world"] != place.world)
        refuse_differences(saved, own, accept)

    def _set_intervals(self) -> None:
        """Set the steps and seconds between validations and between checkpoints; infinity means never.

        With `trainer.checkpoint.every=auto`, `Checkpointer` updates `save_s` after each checkpoint.
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
        """Return the decisions of the launcher or else of rank 0, after a comparison with this rank's view.

        Raises:
            ConfigError: Ranks see different settings or data.
            DataError: The data is no longer the data that the launcher saw.
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
        """Open the data in turns. With `planned` the launcher has prepared the files of its node."""
        seed, timeout_s = self.options.seed, self.options.timeout_s

        def opens() -> list[Any]:
            prepare_files(recipe, seed, here=place.local_rank == 0 and (place.rank > 0 or not planned))
            return [open_source(recipe, split, seed, self.data, timeout_s) for split in ("train", "val")]

        source, self.validation = in_turns(place, each, opens)
        if source is None:
            raise ConfigError("recipe.data('train'): is None; return the data to train on")
        validation = {} if self.validation is None else each_set(self.validation, "val")
        for split, part in {"train": source, **validation}.items():
            refuse_other_replicas(part, split, place.rank % self.data_world, self.data_world)
        size = batch_size_of(source)
        if self.splits and size:
            self.micro, self.accumulate = split_by(size, self.batch, self.data_world)
        self.source = source = self._limit(source, recipe)
        self.order = source.order(self.data.lanes, self.data.block) if isinstance(source, Samples) else None
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
        batches = None if self.order else batches_in(source, self.data_world)
        self.epoch_samples = self.order.samples if self.order else (batches or 0) * self.micro * self.data_world or None

    def _limit(self, source: Any, recipe: Any) -> Any:
        """Limit the training data, which is returned, and the validation data, by `limit_batches` or `overfit`."""
        few, limits = self.options.overfit, self.options.limit_batches
        if few is not None:
            if not isinstance(source, Samples):
                raise ConfigError(
                    f"trainer.overfit={few}: recipe.data('train') is an iterable of batches, which may be others each "
                    "time it is walked; give trainer.limit_batches.train instead, or return a Dataset"
                )
            source = first_batches(source, few, self.batch, self.accumulate, "trainer.overfit")
            own = transform_of(recipe, self.data, validates=True)
            same = Samples(source.reader, source.counts, source.fingerprint, own, source.seed)
            self.validation = None if self.validation is None else same
            return source
        self.validation = first_validation(self.validation, limits.validation, self.batch)
        return first_batches(source, limits.train, self.batch, self.accumulate, "trainer.limit_batches.train")

    @property
    def watched(self) -> dict[str, str]:
        """Return the validation metrics that the run depends on: config key -> name."""
        watched = {f"callbacks.{name}.metric": c.metric for name, c in self.callbacks.items() if c.metric}
        if best := self.options.checkpoint.keep_best:
            watched["trainer.checkpoint.keep_best"] = parse_best(best)[0]
        return watched

    def features(self) -> set[str]:
        return features(self.options)

    def _find_checkpoint(self, rank: int, each: Callable[..., list[Any]], spec: RunSpec | None) -> list[str] | None:
        """Return the checkpoint that the launcher or else rank 0 found, and its manifest's sha256.

        A restart asks for the newest checkpoint, which rank 0 then looks for anew.
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
            log.info("resume: there is no checkpoint in %s yet; a new run begins", root)
        return found

    def _see_checkpoint(
        self, found: list[str] | None, each: Callable[..., list[Any]], hashes: bool
    ) -> tuple[Path | None, dict[str, Any]]:
        """Read the manifest on all ranks. With `hashes`, this rank also compares the hashes of all files, for its node.

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

    def _max_steps(self) -> int | None:
        options = self.options
        limits = [] if options.max_steps is None else [options.max_steps]
        if options.max_epochs is not None:
            limits.append(self.step_after("trainer.max_epochs", Duration(options.max_epochs, "epochs")))
        return min(limits, default=None)

    def step_after(self, key: str, given: Any) -> int:
        """Return the step that ends a duration from the run's beginning. Samples and epochs count those trained on.

        Raises:
            ConfigError: As of `Duration.steps`.
        """
        duration = Duration.parse(given, key)
        if duration.unit == "steps":
            return duration.steps(key, self.batch, self.epoch_samples)
        return self.step_at(duration.samples(key, self.batch, self.epoch_samples))

    def step_at(self, samples: Fraction) -> int:
        """Return the first step after which the run has trained on so many samples."""
        return self.done["step"] + math.ceil((samples - self.done["samples"]) / self.batch)

    def samples_at(self, step: int) -> int:
        """Return the samples that the run has trained on after a step. Before the resumed one, its batch counts."""
        ahead = step - self.done["step"]
        return self.done["samples"] + ahead * (self.batch if ahead > 0 else self.batch_before)

    def periods(self, key: str, given: Any, start: int | Fraction = 0) -> Periods:
        """Return the periods of a duration, which count steps, or else the samples trained on.

        Args:
            start: Of the first one, in the same unit.

        Raises:
            ConfigError: As of `Duration.steps`.
        """
        duration, begins = Duration.parse(given, key), Fraction(start)
        if duration.unit == "steps":
            return Periods(int, Fraction(duration.steps(key, self.batch, self.epoch_samples)), begins)
        return Periods(self.samples_at, duration.samples(key, self.batch, self.epoch_samples), begins)

    def validates_at(self, step: int) -> bool:
        """Return whether `validate_every` asks for a validation after a step: the first that reaches a multiple."""
        return self.validations is not None and self.validations.end_at(step)

    def next_validation(self, step: int) -> float:
        """Return the next step after which `validate_every` asks for a validation; infinity for none."""
        if self.validations is None or self.validate_every is None:
            return math.inf
        end = self.validations.next_end(step)
        return math.ceil(end) if self.validate_every.unit == "steps" else self.step_at(end)

    def identity(self) -> dict[str, Any]:
        """Return the settings and the data that must be the same for an exact resume."""
        data = self.source.fingerprint if isinstance(self.source, Samples | FirstOf) else "iterable"
        own = {"seed": self.options.seed, "batch": self.batch, "data": data, "callbacks": stateful(self.callbacks)}
        own |= {"lanes": self.data.lanes, "block": self.data.block}
        return own if self.order or not self.epoch_samples else own | {PASS: self.epoch_samples}


def stateful(callbacks: Mapping[str, Callback]) -> list[str]:
    """Return the callbacks that a resume compares.

    A callback that distributes the model is left out, since any layout over ranks resumes any other. So is an observer,
    which changes no weight.
    """
    return [
        name for name, callback in callbacks.items() if not (observes(callback) or overrides(callback, "distribute"))
    ]


def identity_without_observers(manifest: Mapping[str, Any], callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return a checkpoint's identity. Older versions listed observers with a state, which `stateful` leaves out."""
    settings, listed = manifest.get("settings", {}), manifest["identity"].get("callbacks")
    if not isinstance(listed, list):
        return manifest["identity"]

    def observed(name: Any) -> bool:
        target = str(settings.get(f"callbacks.{name}._target_", ""))
        if name in callbacks:
            return observes(callbacks[name])
        kind = kinds().get(name)
        return kind is not None and in_conf(target) is not None and observes(kind)

    return manifest["identity"] | {"callbacks": [name for name in listed if not observed(name)]}


def observes(callback: Callback | type[Callback]) -> bool:
    return callback.role in (Role.MEASURE, Role.OBSERVE)


def features(options: Options) -> set[str]:
    """Return the features of the trainer that are on, as `Callback.conflicts` names them."""
    ddp = options.ddp
    on = {
        "clip": options.clip_norm is not None,
        "clip_value": options.clip_value is not None,
        "fp16": "fp16" in options.precision,  # of some rank
        "fp8": options.precision == "fp8",
        "bf16_params": options.precision == "bf16_params" and options.master_weights,
        "bf16_weights": not options.master_weights,
        "sync_batch_norm": options.sync_batch_norm,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
    }
    return {name for name, active in on.items() if active}


def refuse_more(options: Options, world: int) -> None:
    if world > 1:
        return
    why = "a Trainer made in Python starts no other ranks"
    if node_range(options.nodes)[0] > 1:
        raise ConfigError(f"trainer.nodes={options.nodes}: {why}; use torchrun or srun, or leave this out")
    if options.devices not in ("auto", 1):
        raise ConfigError(
            f"trainer.devices={options.devices}: {why}; make it in a function, and leave this out for "
            f"launch(FUNCTION, devices={options.devices})"
        )


def split_over(callbacks: Mapping[str, Callback], world: int) -> int:
    """Return the number of ranks that read different samples.

    Raises:
        ConfigError: The stages of a callback do not divide the ranks.
    """
    for name, callback in callbacks.items():
        if world % callback.stages:
            divisors = [str(n) for n in range(2, world + 1) if world % n == 0]
            way_out = f"use {' or '.join(divisors)}" if divisors else f"leave {name} out"
            raise ConfigError(f"callbacks.{name}.stages={callback.stages}: does not divide {world} rank(s); {way_out}")
        world //= callback.stages
    return world


def split_by(size: int, batch: int, world: int) -> tuple[int, int]:
    """Split a batch by the batches of an iterable, which have `size` samples.

    Raises:
        ConfigError: It does not divide.
    """
    if batch % (unit := size * world):
        low = batch // unit * unit
        nearest = " or ".join(f"batch={b}" for b in (low, low + unit) if b)
        raise ConfigError(
            f"batch={batch}: recipe.data('train') yields batches of {size} samples on each of {world} rank(s); give "
            f"{nearest}, or another batch_size of the DataLoader"
        )
    return size, batch // unit


def refuse_no_functions(data: DataOptions) -> None:
    """Refuse what is no function in `data.decoders` and `data.map`; a config's names are functions by now."""
    for key, functions in (("data.decoders", data.decoders), ("data.map", data.map)):
        for number, function in enumerate(functions):
            checked(f"{key}.{number}", function, Callable[..., Any])


def refuse_incomplete(recipe: Any, callbacks: Mapping[str, Any]) -> None:
    """Refuse a recipe or a callback that lacks a method or whose methods take other parameters, and other objects."""
    if isinstance(recipe, type):
        raise ConfigError(f"recipe: is the class {recipe.__name__}, not an object of it; give {recipe.__name__}()")
    missing = [name for name in ("model", "data", "loss") if not callable(getattr(recipe, name, None))]
    if missing:
        has = f"recipe: {type(recipe).__name__} has no method {missing[0]!r}"
        raise ConfigError(f"{has}; define model, data and loss, as in trainer/recipe.py")
    refuse_other_parameters(recipe)
    for name, callback in callbacks.items():
        refuse_no_callback(f"callbacks.{name}", callback)
        refuse_other_hooks(name, callback)


def refuse_other_ranks(own: Mapping[str, Any], each: Callable[[Any], list[Any]]) -> None:
    """Refuse ranks with different arguments or data: such ranks would train apart, or wait without end."""
    first, *others = each(own)
    for rank, other in enumerate(others, start=1):
        for key in first | other:
            if other.get(key) != first.get(key):
                raise ConfigError(
                    f"{key} is {short(first.get(key))} on rank 0 and {short(other.get(key))} on rank {rank}; "
                    "start all ranks with the same arguments, on the same data"
                )


def settings_in_common(settings: Mapping[str, Any], callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return the settings that all ranks must share; a node may have paths, interfaces and loggers of its own."""
    observe = (name for name, callback in callbacks.items() if getattr(callback, "role", None) is Role.OBSERVE)
    loggers = tuple(f"callbacks.{name}." for name in observe)
    common = {key: value for key, value in settings.items() if not key.startswith(("trainer.", "nccl.", *loggers))}
    return {key: "a path" if isinstance(value, str) and "/" in value else value for key, value in common.items()}


def refuse_other_manifests(manifest: Mapping[str, Any], key: str) -> None:
    """Refuse a valid manifest that no run has written: it may be a stranger's."""
    kinds = {"run_dir": str, "samples": int, "world": int, "identity": dict, "buckets": list, "ddp": dict}
    wrong = [name for name, kind in kinds.items() if not fits(manifest.get(name), kind)]
    may = {"rank_states": list[str], "settings": dict, "versions": dict, "uneven": bool, "decisions": dict}
    wrong += [name for name, kind in may.items() if name in manifest and not fits(manifest[name], kind)]
    wrong += [name for name in ("model", "optimizer", "data") if name not in (manifest.get("identity") or ())]
    if wrong or not 0 <= manifest["samples"] < 1 << 62 or not 0 < manifest["world"] <= MOST_RANKS:
        raise ConfigError(
            f"{key}: its manifest has no valid {', '.join(wrong) or 'samples or world'}; "
            "give a checkpoint that Echelon wrote"
        )


def refuse_unmerged(callbacks: Mapping[str, Callback], manifest: Mapping[str, Any], world: int) -> None:
    """Refuse a resume on another number of ranks if a callback can't merge the ranks' states.

    Raises:
        ConfigError: The checkpoint has a state for each rank, and the callback has no merge_rank_states.
    """
    for name in sorted(callbacks.keys() & set(manifest.get("rank_states", ()))):
        if not overrides(callbacks[name], "merge_rank_states"):
            raise ConfigError(
                f"callbacks.{name}: the checkpoint has states of {manifest['world']} rank(s), there are {world} now, "
                f"and {type(callbacks[name]).__name__} has no merge_rank_states; resume on {manifest['world']} "
                f"rank(s), define merge_rank_states, or leave {name} out"
            )


def refuse_other_recipe(recipe: Any, manifest: Mapping[str, Any], own: Mapping[str, Any], accept: list[str]) -> None:
    """Refuse another recipe's checkpoint, with both names: the fingerprint of the data would say nothing to a user."""
    was, now = str(manifest.get("settings", {}).get("recipe._target_", "")).rpartition(".")[2], type(recipe).__name__
    if was not in ("", now) and own["data"] != manifest["identity"]["data"] and "data" not in accept:
        raise ConfigError(
            f"trainer.resume: the checkpoint was written with recipe {was}, and this run has recipe {now}; choose "
            f"recipe {was}, or start anew with trainer.resume=null"
        )


def refuse_other_pass(was: Any, now: int, accepted: bool) -> None:
    """Refuse a resume whose passes over an iterable have other samples: it would begin in the middle of a pass.

    Raises:
        ConfigError: The difference is not `accepted`.
    """
    text = (
        f"a pass over recipe.data('train') had {short(was)} samples in the checkpoint and has {now}, since a short "
        "last batch counts as a whole one"
    )
    if not accepted:
        raise ConfigError(
            f"trainer.resume: {text}; set batch and batch_size back, start a new run with a Dataset or drop_last=True, "
            "or accept other epochs by 'trainer.accept=[batch,data]'"
        )
    log.warning("resume: %s; epochs and the place in the data count by the new one", text)


def refuse_differences(saved: Mapping[str, Any], own: Mapping[str, Any], accept: list[str]) -> None:
    """Refuse a resume if a key that both have differs and is not in `accept`.

    Raises:
        ConfigError: The message names each key, both values, and the setting that accepts the difference.
    """
    different = [key for key in own if key in saved and saved[key] != own[key]]
    for key in different:
        if key in accept:
            text = "resume: %s was %s and is %s, as accepted; the run won't repeat the interrupted one bit for bit"
            log.warning(text, key, saved[key], own[key])
    refused = [key for key in different if key not in accept]
    if refused:
        lines = "; ".join(
            f"{key} was {short(saved[key])} in the checkpoint and is {short(own[key])}" for key in refused
        )
        raise ConfigError(
            f"trainer.resume: {lines}; set this back, or accept it by 'trainer.accept=[{','.join(accept + refused)}]'"
        )


def short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value).replace("'", "")
