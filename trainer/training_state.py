"""Collects the state of a trainer for a checkpoint, and restores it."""

import hashlib
import math
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.nn.utils import get_total_norm

from trainer import timeouts
from trainer.annotated import fits
from trainer.callback import Role, TrainerProtocol, overrides
from trainer.callback_checks import saved
from trainer.checkpoint import fence, retention
from trainer.checkpoint.compare import differences, plain
from trainer.checkpoint.direction import warn_of_direction
from trainer.checkpoint.interval import Interval
from trainer.checkpoint.lock import Claim
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.parts import is_part_section, open_parts, read_all
from trainer.checkpoint.saver import Saver, State
from trainer.checkpoint.serialize import is_rank_section, load_sections, load_state, optimizer_state, rank_section
from trainer.comm.phases import Phase, during
from trainer.data.bad_samples import BadSamples
from trainer.errors import NOT_FINITE, ConfigError, printable
from trainer.log import doing, log
from trainer.optim.groups import ParameterRules
from trainer.optim.rates import Rates
from trainer.plan import Plan, refuse_differences
from trainer.process.signals import StopSignals
from trainer.run_dir import versions

# Keys of `trainer` that change weights.
OPTIONS = (
    "precision", "master_weights", "deterministic", "max_steps", "max_epochs", "clip_norm", "clip_value",
    "sync_batch_norm",
)  # fmt: skip

COUNTERS = {"step": int, "samples": int, "seconds": float, "validation": dict, "validated_step": int}

SECTIONS = {**COUNTERS, "best": dict, "model": dict, "optimizer": dict, "callbacks": dict, "scaler": dict}
SECTIONS |= {"quarantine": dict}


class SavedTrainer(TrainerProtocol, Protocol):
    """The attributes of a trainer that are saved and restored."""

    saver: Saver
    interval: Interval
    quarantine: BadSamples
    settings: dict[str, Any]  # of the config, for the manifest
    rules: ParameterRules  # settings for some of the parameters
    rates: Rates
    validation: dict[str, float]  # the metrics of the last validation
    validated_step: int  # the step of the last validation
    bests: list[dict[str, Any]]  # validations that were the best, the newest last
    ended: str  # why the run to resume has nothing left to do; empty if it goes on
    loaded: tuple[int, int] | None  # step and validated_step of the resumed checkpoint
    started: float
    saved_at: float
    signals: StopSignals
    argv: Sequence[str] | None

    @property
    def plan(self) -> Plan: ...

    @property
    def best(self) -> dict[str, Any]: ...

    def validate(self) -> bool:
        """Validate the model."""
        ...


def saved_in(trainer: SavedTrainer) -> Path:
    """Return the folder of this run's checkpoints."""
    return Path(trainer.options.checkpoint.dir) / trainer.run_dir.name


def claim(trainer: SavedTrainer, refused: ExitStack) -> Claim | None:
    """Claim the right to write the run, on rank 0; `refused` gives it back. A run that has ended is not written.

    Raises:
        ConfigError: Another process writes the run.
    """
    if trainer.rank or trainer.ended:
        return None
    taken = Claim(saved_in(trainer), trainer.run_dir)
    refused.callback(taken.close)
    return taken


def make_saver(trainer: SavedTrainer, claim: Claim | None) -> Saver:
    """Make the writer of the trainer's checkpoints. A collective."""
    own = ("rank_state_dict", "distribute")  # a state or a strategy that differs between ranks
    shared = any(overrides(callback, hook) for callback in trainer.plan.callbacks.values() for hook in own)
    shared &= not trainer.ended  # else nothing is written
    options = trainer.options.checkpoint
    saver = Saver(saved_in(trainer), options, trainer.ranks, trainer.heartbeat, claim, shared)
    if options.keep_best and not (trainer.rank or trainer.ended):
        name, sign = retention.parse_best(options.keep_best)
        way_out = f"trainer.checkpoint.keep_best='{'max ' if sign > 0 else ''}{name}'"
        warn_of_direction(f"trainer.checkpoint.keep_best={options.keep_best}", name, sign < 0, way_out)
    saver.on_settled = lambda facts: trainer.emit("on_event", "checkpoint", facts)
    return saver


def make_interval(trainer: SavedTrainer) -> Interval:
    """Make the interval between checkpoints, which counts the failures in the run's folder."""
    return Interval(bool(trainer.options.checkpoint.every), trainer.world, trainer.run_dir / "logs")


@during(Phase.CHECKPOINT)
@doing("writing")
def save(trainer: SavedTrainer, last: bool = False) -> None:
    """Begin a checkpoint of this step; wait for the last one. A collective.

    Weights that are not finite end the run, and are not written: the newest checkpoint can be resumed.

    Raises:
        ConfigError: The last checkpoint can't be written. After a signal, only if there is no older checkpoint.
    """
    trainer.emit("on_flush")
    if trainer.options.dry_run:
        return
    trainer.saved_at = time.monotonic()
    trainer.seconds = trainer.saved_at - trainer.started
    validated, stopped = trainer.validated_step == trainer.step, trainer.stop_reason == "signal"
    if not (finite := is_finite(trainer)):
        log.error("step %d: weights are not finite, so no checkpoint of them is written", trainer.step)
        trainer.stop(NOT_FINITE)
    saver, began_at = trainer.saver, trainer.saver.began_at
    write_s = max(0.0, saver.written_at - began_at)  # of the checkpoint before
    try:
        trainer.saver.save(
            trainer.step, lambda: state(trainer), last, must=validated, stopped=stopped,
            saved=is_saved(trainer) or not finite,
        )  # fmt: skip
    finally:
        if last:
            trainer.heartbeat.beat(patience_s=timeouts.EXPORT_S)  # rank 0 may export
    if saver.began_at > began_at and not last:
        trainer.interval.measure(saver.stall_s, write_s, trainer.seconds)
        follow(trainer)


def is_finite(trainer: SavedTrainer) -> bool:
    """Return whether the trained weights of all ranks are finite. Waits for the device; a collective."""
    weights = (getattr(p, "to_local", lambda p=p: p)().detach() for p in trainer.strategy.parameters)
    own = [weight for weight in weights if weight.numel()]
    return all(trainer.ranks.each(bool(get_total_norm(own, math.inf).isfinite())))


def follow(trainer: SavedTrainer) -> None:
    """Let the plan's clock follow the interval of `trainer.checkpoint.every=auto`. Rank 0's clock decides."""
    if trainer.interval.auto and trainer.interval.stall_s:
        trainer.plan.save_s = trainer.interval.seconds


@during(Phase.CHECKPOINT)
def reserve(trainer: SavedTrainer) -> None:
    """Allocate memory for this rank's tensors of a checkpoint. No collective."""
    trainer.interval.restart_s = time.monotonic() - trainer.interval.made_at
    parts = trainer.strategy.save(trainer.optimizer)
    trainer.saver.reserve({} if trainer.rank else tensors(trainer, parts), parts)


def state(trainer: SavedTrainer) -> State:
    """Return this rank's part of a checkpoint."""
    own = {
        name: state
        for name, callback in trainer.callbacks.items()
        if (state := saved(name, callback, "rank_state_dict"))
    }
    parts = trainer.strategy.save(trainer.optimizer)
    if "model" in parts and (split := trainer.strategy.own_part(callback_states(trainer))) is not None:
        parts = {**parts, "callbacks": split}
    if trainer.rank:
        return State({}, own, {}, parts)
    return State(state_dict(trainer, parts), own, manifest(trainer, sorted(own)), parts)


def state_dict(trainer: SavedTrainer, parts: Collection[str]) -> dict[str, Any]:
    """Return the state that is equal on all ranks, but for the sections `parts`. Its tensors are the live ones."""
    return {
        **tensors(trainer, parts),
        "callbacks": {} if "callbacks" in parts else callback_states(trainer),
        "scaler": trainer.scaler.state_dict(),
        "step": trainer.step,
        "samples": trainer.samples,
        "seconds": trainer.seconds,
        "best": trainer.best,
        "validation": trainer.validation,
        "validated_step": trainer.validated_step,
        "quarantine": trainer.quarantine.state_dict(),
        **({"rates": trainer.rates.peaks} if trainer.rates.by_hand else {}),
        **({"interval": trainer.interval.state_dict()} if trainer.interval.auto else {}),
    }


def callback_states(trainer: SavedTrainer) -> dict[str, Any]:
    """Return the state of each callback. Its tensors are the live ones."""
    return {name: saved(name, callback, "state_dict") for name, callback in trainer.callbacks.items()}


def tensors(trainer: SavedTrainer, parts: Collection[str]) -> dict[str, Any]:
    """Return the large part of `state_dict`."""
    model = {} if "model" in parts else trainer.global_model.state_dict()
    return {
        "model": model,
        "optimizer": {} if "optimizer" in parts else optimizer_state(trainer.optimizer, trainer.module),
    }


def manifest(trainer: SavedTrainer, rank_states: list[str]) -> dict[str, Any]:
    """Describe the run for a resume. `rank_states` names the callbacks of which each rank has its own state."""
    measured = trainer.validation if trainer.validated_step == trainer.step else {}
    return {
        "run_dir": str(trainer.run_dir),
        "samples": trainer.samples,
        "world": trainer.world,
        "uneven": trainer.plan.uneven,
        "identity": trainer.plan.identity() | model_identity(trainer),
        "buckets": trainer.buckets,
        "ddp": trainer.ddp,
        "rank_states": rank_states,
        "decisions": {
            name: made
            for name, callback in trainer.callbacks.items()
            if not (callback.communicates and trainer.world == 1) and (made := saved(name, callback, "decisions"))
        },
        "settings": plain(settings(trainer)),
        "metrics": {name: value for name, value in measured.items() if math.isfinite(value)},  # candidates for the best
        "versions": versions(),
    }


def settings(trainer: SavedTrainer) -> dict[str, Any]:
    """List the settings that a resume compares: the trainer's own, and those of a command's config."""
    plan = trainer.plan
    return {
        "micro_batch": plan.micro,
        "accumulate": plan.accumulate,
        "trainer.accelerator": trainer.device.type,
        "trainer.backend": trainer.ranks.backend,
        **{f"trainer.{name}": getattr(plan.options, name) for name in OPTIONS},
        **trainer.settings,
        "optimizer.groups": trainer.rules.described(),
    }


def model_identity(trainer: SavedTrainer) -> dict[str, str]:
    """Return a hash of the weights' names, shapes and types, and the name of the optimizer."""
    shapes = "".join(f"{name} {tuple(p.shape)} {p.dtype};" for name, p in trainer.module.state_dict().items())
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {"model": hashlib.sha256(shapes.encode()).hexdigest(), "optimizer": type(optimizer).__name__}


def refuse_other_model(trainer: SavedTrainer, path: Path) -> None:
    """Refuse a checkpoint of another model or optimizer than the trainer's.

    Raises:
        ConfigError: The model or the optimizer differs.
    """
    saved, own = trainer.plan.manifest["identity"], model_identity(trainer)
    if saved["model"] != own["model"]:
        raise ConfigError(
            f"trainer.resume={path}: is a checkpoint of another model (names, shapes or dtypes of weights differ); "
            "set recipe.* and trainer.master_weights back, or start anew with trainer.resume=null"
        )
    refuse_differences(saved, {"optimizer": own["optimizer"]}, trainer.options.accept)


def load(trainer: SavedTrainer, path: Path) -> None:
    """Put a checkpoint's state back. It was verified when it was chosen, and is of this model.

    Raises:
        Damaged: its parts are not those of one run.
    """
    saved, other_world = trainer.plan.manifest, trainer.plan.manifest["world"] != trainer.world
    own_section = "" if other_world else rank_section(trainer.rank)
    sections = open_parts(path, saved["files"], saved["world"])

    def wanted(name: str) -> bool:
        return name == own_section or not (name in sections or is_rank_section(name) or is_part_section(name))

    state = load_state(path, saved["files"], wanted)
    _refuse_odd({**state, **sections}, saved, path)
    if "callbacks" in sections:
        state["callbacks"] = read_all(sections.pop("callbacks"))
    with _of_its_kind(path, "model or optimizer"):
        if saved["identity"]["optimizer"] != model_identity(trainer)["optimizer"]:  # as accepted
            del sections["optimizer"]
        trainer.strategy.load(trainer.optimizer, sections)
        if state["scaler"]:  # empty where the run was not in fp16
            trainer.scaler.load_state_dict(state["scaler"])
    for name in COUNTERS:
        setattr(trainer, name, state[name])
    with _of_its_kind(path, "rates"):
        trainer.rates.restore(state.get("rates"))
    trainer.bests, trainer.loaded = [state["best"]], (trainer.step, trainer.validated_step)
    trainer.quarantine.load_state_dict(state["quarantine"])
    with _of_its_kind(path, "checkpoint.every=auto"):
        trainer.interval.load_state_dict(state.get("interval", {}), trainer.seconds)
    follow(trainer)
    for name, callback in trainer.callbacks.items():
        with _of_its_kind(path, f"callbacks.{name}"):
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
            elif overrides(callback, "state_dict"):
                log.info("resume: callback %s is new, so it starts without a state", name)
            _load_rank_state(trainer, name, state.get(own_section, {}), path)
    for name in sorted({*saved.get("rank_states", ()), *state["callbacks"]} - trainer.callbacks.keys()):
        log.warning("resume: the run has no callback %s now, so its state in the checkpoint is dropped", name)
    if not trainer.ended:
        log.info("resumed from %s at step %d, sample %d", path, trainer.step, trainer.samples)
        _log_differences(trainer, other_world)


def load_ended(trainer: SavedTrainer, why: str) -> None:
    """Put the state of a run back that has nothing left to do: its weights, or their average, may be asked for."""
    assert trainer.plan.resumed
    load(trainer, trainer.plan.resumed)
    if trainer.strategy.whole:
        for average in (callback for callback in trainer.callbacks.values() if callback.role is Role.AVERAGE):
            average.on_fit_start(trainer)
    trainer.stop(why)


def _load_rank_state(trainer: SavedTrainer, name: str, own_section: dict[str, Any], path: Path) -> None:
    callback, saved = trainer.callbacks[name], trainer.plan.manifest
    state, merges = own_section.get(name), overrides(callback, "merge_rank_states")
    if saved["world"] != trainer.world and merges and name in saved.get("rank_states", [name]):
        state = callback.merge_rank_states(_rank_states(path, saved, name))
    if state:
        callback.load_rank_state_dict(state)
        if trainer.world == 1 and callback.communicates:
            log.warning("resume: %s does nothing on one rank; its states of the ranks are not used", name)


def _rank_states(path: Path, saved: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the state that each rank's callback of this name has saved, one rank in memory at a time."""
    ranks = {rank_section(rank) for rank in range(saved["world"])}
    for _, section in load_sections(path, saved["files"], ranks.__contains__):
        if name in section:
            yield section.pop(name)
        del section  # before the next is read


def _log_differences(trainer: SavedTrainer, other_world: bool) -> None:
    saved = trainer.plan.manifest
    for difference in differences(saved, manifest(trainer, [])):
        log.warning("resume: %s", difference)
    if other_world:
        text = "resume: %d ranks in the checkpoint, %d now: the same samples, but not the same bits"
        log.info(text, saved["world"], trainer.world)
    elif saved["buckets"] != trainer.buckets:
        log.warning("resume: DDP laid its buckets out differently, so sums may differ in their last bits")
    if trainer.plan.order is None:
        log.info(
            "resume: this recipe's data is an iterable of batches, so the first %d steps are replayed", trainer.step
        )


def _refuse_odd(state: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Raise Damaged if the state has other parts than a run writes. A complete checkpoint may be an attacker's."""
    way_out = "no run writes such a checkpoint; go on from another one"
    wrong = [name for name, kind in SECTIONS.items() if not fits(state.get(name), kind)]
    if not wrong:
        best, quarantine = state["best"], state["quarantine"]
        parts = {"best": [best.get("metric", ""), best.get("value", 0.0), best.get("step", 0)]}
        parts |= {"quarantine": [quarantine.get("epoch"), quarantine.get("count")]}
        parts |= {"validation": list(state["validation"].values())}
        kinds = {"best": tuple[str, float, int], "quarantine": tuple[int, int], "validation": list[float]}
        wrong = [name for name in parts if not fits(parts[name], kinds[name])]
    if wrong:
        raise Damaged(f"trainer.resume={path}: its state has no valid {' or '.join(wrong)}; {way_out}")
    for key in ("step", "samples"):  # the data goes on from the manifest's, the counters from the state's
        if state[key] != saved[key]:
            reason = f"state.json is at {key} {state[key]}, its manifest at {saved[key]}"
            raise Damaged(f"trainer.resume={path}: {reason}; {way_out}")


@contextmanager
def _of_its_kind(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:  # out of memory, or a failed rank
            raise
        why = printable(f"{type(error).__name__}: {error}")[:300]
        reason = f"its state of {what} can't be restored ({why})"
        raise Damaged(f"trainer.resume={path}: {reason}; go on from another checkpoint") from error


def done(trainer: SavedTrainer) -> dict[str, int]:
    """Return the steps and samples that are done: until the state is loaded, those of the checkpoint."""
    saved = {} if trainer.loaded else trainer.plan.manifest
    return {"steps": saved.get("step", trainer.step), "samples": saved.get("samples", trainer.samples)}


def is_saved(trainer: SavedTrainer) -> bool:
    """Return whether this step and its validation are in a checkpoint of this run."""
    resumed = trainer.plan.resumed
    if resumed is None or (trainer.step, trainer.validated_step) != trainer.loaded:
        return False
    return os.path.realpath(resumed.parent) == os.path.realpath(saved_in(trainer))


def refuse_superseded(trainer: SavedTrainer) -> None:
    """Refuse to go on if another process writes the run now.

    Raises:
        Superseded: another process writes the run now.
    """
    if trainer.rank == 0:
        fence.refuse_superseded(saved_in(trainer), trainer.saver.attempt)


def leave_newer(trainer: SavedTrainer) -> None:
    """Set aside the checkpoints after the resumed step. Called when nothing can refuse the run any more."""
    if trainer.rank:
        return
    refuse_superseded(trainer)
    saved, best = saved_in(trainer), trainer.options.checkpoint.keep_best
    if trainer.plan.resumed and (hidden := retention.set_aside(saved, trainer.step, best)):
        log.warning(
            "resume: goes on from step %d; later checkpoints are set aside: %s", trainer.step, ", ".join(hidden)
        )
    trainer.quarantine.begin()


def validate_again(trainer: SavedTrainer) -> None:
    """Validate before the first step, if a signal prevented that at the checkpoint's step. A collective."""
    plan, step = trainer.plan, trainer.step
    due = plan.resumed and step and plan.validates_at(step) and not trainer.stop_reason
    if due and trainer.validated_step != trainer.step and trainer.validate():
        save(trainer)


def best(trainer: SavedTrainer) -> dict[str, Any]:
    """Return the best validation; with `keep_best`, the best one whose checkpoint could be written."""
    lost = trainer.saver.failed if trainer.options.checkpoint.keep_best else set[int]()
    return next((found for found in reversed(trainer.bests) if found.get("step") not in lost), {})


def note_best(trainer: SavedTrainer) -> bool:
    """Record the validation if it is the best, by `checkpoint.keep_best` or else by the loss.

    Return whether it needs a checkpoint. A collective: only rank 0 knows which checkpoints could be written.
    """
    before = trainer.ranks.first(trainer.best)
    metric = trainer.options.checkpoint.keep_best or next((m for m in trainer.validation if m == "val/loss"), None)
    if metric is None:
        return False
    name, sign = retention.parse_best(metric)
    value = trainer.validation.get(name, math.nan)
    worse = before.get("metric") == metric and sign * value >= sign * before["value"]  # else it is another setting's
    if not math.isfinite(value) or worse:
        return False
    trainer.bests.append({"metric": metric, "value": value, "step": trainer.step})
    return trainer.options.checkpoint.keep_best is not None
