"""Collects the state of a run for a checkpoint, and restores it."""

import hashlib
import math
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.nn.utils import get_total_norm

from trainer import timeouts
from trainer.annotated import fits
from trainer.callback import Role, overrides
from trainer.checkpoint import fence, retention
from trainer.checkpoint.compare import differences, plain
from trainer.checkpoint.direction import warn_of_direction
from trainer.checkpoint.interval import Interval
from trainer.checkpoint.lock import Claim
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.parts import is_part_section, open_parts, read_all
from trainer.checkpoint.saver import Saver, State
from trainer.checkpoint.serialize import is_rank_section, load_sections, load_state, optimizer_state, rank_section
from trainer.checks.callback import saved
from trainer.checks.plan import refuse_differences
from trainer.comm.phases import Phase, during
from trainer.context import Context
from trainer.errors import NOT_FINITE, ConfigError, printable
from trainer.log import doing, log
from trainer.optim.groups import ParameterRules
from trainer.optim.rates import Rates
from trainer.plan import Plan
from trainer.run_dir import versions
from trainer.state import COUNTERS

# Keys of `trainer` that change weights.
OPTIONS = (
    "precision", "master_weights", "deterministic", "max_steps", "max_epochs", "clip_norm", "clip_value",
    "sync_batch_norm",
)  # fmt: skip

OF_RANKS = ("machine.threads was ", "micro_batch was ", "accumulate was ")  # differences that follow from other ranks
OF_RATE = ("optimizer.lr was ", "schedule.")  # differences that move the learning rate by themselves

SECTIONS = {**COUNTERS, "best": dict, "model": dict, "optimizer": dict, "callbacks": dict, "scaler": dict}
SECTIONS |= {"quarantine": dict}


class Stateful(Protocol):
    """An object with a state of JSON values or tensors for checkpoints. An empty state is not restored."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def folder_of(trainer: Context) -> Path:
    """Return the folder that holds this run's checkpoints."""
    return Path(trainer.options.checkpoint.dir) / trainer.run_dir.name


def claim(trainer: Context) -> Claim | None:
    """Claim the right to write the run on rank 0; None on other ranks and for a completed run.

    Raises:
        ConfigError: Another process writes the run.
    """
    return None if trainer.rank or trainer.ended else Claim(folder_of(trainer), trainer.run_dir)


def make_saver(trainer: Context, claim: Claim | None) -> Saver:
    """Make the writer of the run's checkpoints. A collective."""
    own = ("rank_state_dict", "distribute")  # a state or a strategy that differs between ranks
    shared = any(overrides(callback, hook) for callback in trainer.callbacks.values() for hook in own)
    shared &= not trainer.ended  # a completed run writes nothing
    options = trainer.options.checkpoint
    saver = Saver(folder_of(trainer), options, trainer.ranks, trainer.heartbeat, claim, shared)
    saver.on_settled = lambda facts: trainer.emit("on_event", "checkpoint", facts)
    return saver


class Checkpointer:
    """Collects the state of a run for a checkpoint, has it written, and restores it.

    The model, the optimizer and the callbacks have sections of their own, because a rank may hold only a part of them.

    Attributes:
        parts: Name in the checkpoint -> any other stateful object. Filled at set-up.
        rules: Per-parameter settings that a resume compares. Set at set-up.
        rates: The learning rates. Set at set-up.
    """

    rules: ParameterRules
    rates: Rates

    def __init__(self, trainer: Context, plan: Plan) -> None:
        self.trainer, self.plan, self.state, self.saver = trainer, plan, trainer.state, trainer.saver
        self.folder = folder_of(trainer)
        # It counts the failures recorded in the run's folder.
        self.interval = Interval(bool(trainer.options.checkpoint.every), trainer.world, trainer.run_dir / "logs")
        self.parts: dict[str, Stateful] = {"interval": self.interval}
        if trainer.options.checkpoint.keep_best:
            self.state.unwritten = self.saver.failed

    @during(Phase.CHECKPOINT)
    @doing("writing")
    def save(self, last: bool = False) -> None:
        """Start a checkpoint of this step; with `last`, wait until it is written. A collective.

        Non-finite weights end the run and are not written, so that the newest checkpoint can be resumed. While the loss
        is not finite, nothing is written either, so that retention keeps the last checkpoint with a finite loss.

        Raises:
            ConfigError: The last checkpoint can't be written. After a signal, only if no older one exists.
        """
        trainer, saver, state = self.trainer, self.saver, self.state
        trainer.emit("on_flush")
        if trainer.options.dry_run:
            return
        state.saved_at = time.monotonic()
        state.count_seconds()
        validated, stopped = state.validated_step == state.step, trainer.stop_reason == "signal"
        if not (finite := self.is_finite()):
            log.error("step %d: weights are not finite, so no checkpoint is written", state.step)
            trainer.stop(NOT_FINITE)
        elif trainer.train_loss.spoils:
            since = trainer.train_loss.since
            log.warning("step %d: no checkpoint, because the loss is not finite since step %d", state.step, since)
        unusable = not finite or trainer.train_loss.spoils
        began_at = saver.began_at
        write_s = max(0.0, saver.written_at - began_at)  # of the previous checkpoint
        try:
            saver.save(
                state.step, self.collect, last, must=validated, stopped=stopped, saved=self.is_saved() or unusable
            )
        finally:
            if last:
                trainer.heartbeat.beat(patience_s=timeouts.EXPORT_S)  # rank 0 may export
        if saver.began_at > began_at and not last:
            self.interval.measure(saver.stall_s, write_s, state.seconds)
            self._follow_interval()

    def is_finite(self) -> bool:
        """Return whether the trained weights are finite on all ranks. Waits for the device; a collective."""
        weights = (getattr(p, "to_local", lambda p=p: p)().detach() for p in self.trainer.strategy.parameters)
        own = [weight for weight in weights if weight.numel()]
        return all(self.trainer.ranks.each(bool(get_total_norm(own, math.inf).isfinite())))

    def is_saved(self) -> bool:
        """Return whether a checkpoint of this run contains this step and its validation."""
        resumed, state = self.plan.resumed, self.state
        if resumed is None or (state.step, state.validated_step) != state.loaded:
            return False
        return os.path.realpath(resumed.parent) == os.path.realpath(self.folder)

    def _follow_interval(self) -> None:
        """Apply the interval of `trainer.checkpoint.every=auto` to the plan. Rank 0's clock decides."""
        if self.interval.auto and self.interval.stall_s:
            self.plan.save_s = self.interval.seconds

    @during(Phase.CHECKPOINT)
    def reserve(self) -> None:
        """Allocate the host memory for this rank's tensors in a checkpoint. No collective."""
        trainer = self.trainer
        self.interval.restart_s = time.monotonic() - self.interval.made_at
        parts = trainer.strategy.save(trainer.optimizer)
        self.saver.reserve({} if trainer.rank else self._tensors(parts), parts)

    def collect(self) -> State:
        """Return this rank's part of a checkpoint. Its tensors are not copies."""
        trainer = self.trainer
        own = {
            name: state
            for name, callback in trainer.callbacks.items()
            if (state := saved(name, callback, "rank_state_dict"))
        }
        parts = trainer.strategy.save(trainer.optimizer)
        if "model" in parts and (split := trainer.strategy.own_part(self._callback_states())) is not None:
            parts = {**parts, "callbacks": split}
        if trainer.rank:
            return State({}, own, {}, parts)
        common = {
            **self._tensors(parts),
            "callbacks": {} if "callbacks" in parts else self._callback_states(),
            **self.state.state_dict(),
            **{n: state for n, part in self.parts.items() if (state := part.state_dict()) or n in SECTIONS},
        }
        return State(common, own, self.manifest(sorted(own)), parts)

    def _callback_states(self) -> dict[str, Any]:
        return {name: saved(name, callback, "state_dict") for name, callback in self.trainer.callbacks.items()}

    def _tensors(self, parts: Collection[str]) -> dict[str, Any]:
        """Return the large state that is equal on all ranks, except the sections `parts`."""
        trainer = self.trainer
        return {
            "model": {} if "model" in parts else trainer.global_model.state_dict(),
            "optimizer": {} if "optimizer" in parts else optimizer_state(trainer.optimizer, trainer.module),
        }

    def manifest(self, rank_states: list[str]) -> dict[str, Any]:
        """Describe the run for a resume. `rank_states` names the callbacks that have a state per rank."""
        trainer, plan, state = self.trainer, self.plan, self.state
        measured = state.validation if state.validated_step == state.step else {}
        return {
            "run_dir": str(trainer.run_dir),
            "samples": state.samples,
            "world": trainer.world,
            "uneven": plan.uneven,
            "identity": plan.identity() | self.model_identity(),
            "buckets": trainer.buckets,
            "ddp": trainer.ddp,
            "rank_states": rank_states,
            "decisions": {
                name: made
                for name, callback in trainer.callbacks.items()
                if not (callback.communicates and trainer.world == 1) and (made := saved(name, callback, "decisions"))
            },
            "settings": plain(self.settings()),
            "metrics": {name: value for name, value in measured.items() if math.isfinite(value)},  # for the best
            "versions": versions(),
        }

    def settings(self) -> dict[str, Any]:
        """List the settings that a resume compares: the trainer's own, and those of a command's config."""
        trainer, plan = self.trainer, self.plan
        return {
            "micro_batch": plan.micro,
            "accumulate": plan.accumulate,
            "trainer.accelerator": trainer.device.type,
            "trainer.backend": trainer.ranks.backend,
            **{f"trainer.{name}": getattr(plan.options, name) for name in OPTIONS},
            **trainer.command.settings,
            **trainer.command.machine,
            "optimizer.groups": self.rules.described(),
        }

    def model_identity(self) -> dict[str, str]:
        """Return a hash of the weights' names, shapes and dtypes, and the name of the optimizer."""
        module, optimizer = self.trainer.module, self.trainer.optimizer
        shapes = "".join(f"{name} {tuple(p.shape)} {p.dtype};" for name, p in module.state_dict().items())
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        return {"model": hashlib.sha256(shapes.encode()).hexdigest(), "optimizer": kind}

    def refuse_other_model(self, path: Path) -> None:
        """Refuse a checkpoint whose model or optimizer is not the run's.

        Raises:
            ConfigError: The model or the optimizer differs.
        """
        saved, own = self.plan.manifest["identity"], self.model_identity()
        if saved["model"] != own["model"]:
            raise ConfigError(
                f"trainer.resume={path}: is a checkpoint of another model (names, shapes or dtypes of weights differ); "
                "set recipe.* and trainer.master_weights back, or start a new run with trainer.resume=null"
            )
        refuse_differences(saved, {"optimizer": own["optimizer"]}, self.trainer.options.accept)

    def load(self, path: Path) -> None:
        """Restore a checkpoint, which was verified when it was chosen and compared with this model.

        Raises:
            Damaged: Its parts do not belong together.
        """
        trainer, saved = self.trainer, self.plan.manifest
        other_world = saved["world"] != trainer.world
        own_section = "" if other_world else rank_section(trainer.rank)
        sections = open_parts(path, saved["files"], saved["world"])

        def wanted(name: str) -> bool:
            return name == own_section or not (name in sections or is_rank_section(name) or is_part_section(name))

        state = load_state(path, saved["files"], wanted)
        _refuse_odd({**state, **sections}, saved, path)
        if "callbacks" in sections:
            state["callbacks"] = read_all(sections.pop("callbacks"))
        with _of_its_kind(path, "model or optimizer"):
            if saved["identity"]["optimizer"] != self.model_identity()["optimizer"]:  # as accepted
                del sections["optimizer"]
                state.pop("group_settings", None)
            trainer.strategy.load(trainer.optimizer, sections)
        self.state.load_state_dict(state)
        for name, part in self.parts.items():
            if own := state.get(name):
                with _of_its_kind(path, name):
                    part.load_state_dict(own)
        self.interval.decide(self.state.seconds)
        self._follow_interval()
        self._load_callbacks(path, state["callbacks"], state.get(own_section, {}))
        if not trainer.ended:
            log.info("resumed from %s at step %d, sample %d", path, self.state.step, self.state.samples)
            self._log_differences(other_world)

    def _load_callbacks(self, path: Path, states: dict[str, Any], of_rank: dict[str, Any]) -> None:
        callbacks = self.trainer.callbacks
        for name, callback in callbacks.items():
            with _of_its_kind(path, f"callbacks.{name}"):
                if name in states:
                    callback.load_state_dict(states[name])
                elif overrides(callback, "state_dict"):
                    log.info("resume: callback %s is new, so it starts without saved state", name)
                self._load_rank_state(path, name, of_rank.get(name))
        for name in sorted({*self.plan.manifest.get("rank_states", ()), *states} - callbacks.keys()):
            log.warning("resume: callback %s is gone from the run, so its saved state is dropped", name)

    def _load_rank_state(self, path: Path, name: str, state: dict[str, Any] | None) -> None:
        callback, saved, world = self.trainer.callbacks[name], self.plan.manifest, self.trainer.world
        merges = overrides(callback, "merge_rank_states")
        if saved["world"] != world and merges and name in saved.get("rank_states", [name]):
            state = callback.merge_rank_states(_rank_states(path, saved, name))
        if state:
            callback.load_rank_state_dict(state)
            if world == 1 and callback.communicates:
                log.warning("resume: %s does nothing on one rank, so its per-rank states are ignored", name)

    def load_ended(self) -> None:
        """Restore a completed run, because the caller may want its weights or their average."""
        trainer = self.trainer
        assert self.plan.resumed
        self.load(self.plan.resumed)
        if trainer.strategy.whole:
            for average in (callback for callback in trainer.callbacks.values() if callback.role is Role.AVERAGE):
                average.on_fit_start(trainer)
        trainer.stop(trainer.ended)

    def _log_differences(self, other_world: bool) -> None:
        saved, trainer = self.plan.manifest, self.trainer
        found = differences(saved, self.manifest([]))
        follow = [each for each in found if other_world and each.startswith(OF_RANKS)]
        for difference in found:
            if difference not in follow:
                log.warning("resume: %s", difference)
        if not any(each.startswith(OF_RATE) for each in found) and (text := self.plan.moved_rate(self.rates.peaks[0])):
            log.info("resume: %s", text)
        if other_world:
            ranks, more = saved["world"], f" ({'; '.join(follow)})" if follow else ""
            log.info(
                "resume: %d rank%s in the checkpoint, %d now%s: the same samples, but not the same bits",
                ranks, "s" * (ranks > 1), trainer.world, more,
            )  # fmt: skip
        elif saved["buckets"] != trainer.buckets:
            log.warning("resume: DDP laid its buckets out differently, so sums may differ in their last bits")
        if self.plan.order is None:
            text = "resume: this recipe's data is an iterable of batches, so the first %d steps are replayed"
            log.info(text, self.state.step)

    def refuse_superseded(self) -> None:
        """Refuse to train if another process writes the run now.

        Raises:
            Superseded: Another process writes the run now.
        """
        if self.trainer.rank == 0:
            fence.refuse_superseded(self.folder, self.saver.attempt)

    def leave_newer(self) -> None:
        """Set aside the checkpoints after the resumed step. Called once all checks have passed."""
        if self.trainer.rank:
            return
        self.refuse_superseded()
        step, best = self.state.step, self.trainer.options.checkpoint.keep_best
        if best:
            name, sign = retention.parse_best(best)
            other = f"trainer.checkpoint.keep_best='{'max ' if sign > 0 else ''}{name}'"
            warn_of_direction(f"trainer.checkpoint.keep_best={best}", name, sign < 0, other)
        if self.plan.resumed and (hidden := retention.set_aside(self.folder, step, best)):
            log.warning("resume: continues from step %d; later checkpoints are set aside: %s", step, ", ".join(hidden))


def _rank_states(path: Path, saved: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the state that this callback saved on each rank, with one rank's state in memory at a time."""
    ranks = {rank_section(rank) for rank in range(saved["world"])}
    for _, section in load_sections(path, saved["files"], ranks.__contains__):
        if name in section:
            yield section.pop(name)
        del section  # free it before the next one is read


def _refuse_odd(state: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Raise Damaged if the state is not one that a run writes: even a complete checkpoint may be an attacker's."""
    way_out = "no run writes such a checkpoint; resume from another one"
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
    for key in ("step", "samples"):  # data resumes from the manifest's, counters from the state's
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
        raise Damaged(f"trainer.resume={path}: {reason}; resume from another checkpoint") from error
