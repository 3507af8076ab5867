"""What a trainer saves, and how it takes it back."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import retention
from trainer.checkpoint.compare import differences, plain
from trainer.checkpoint.fence import refuse_superseded
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.serialize import Packed, load_optimizer_state, load_state, optimizer_state, pack
from trainer.errors import ConfigError
from trainer.log import log
from trainer.plan import refuse_differences
from trainer.run_dir import versions

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def saved_in(trainer: "Trainer") -> Path:
    """The folder of this run's checkpoints."""
    return Path(trainer.options.checkpoint.dir) / trainer.run_dir.name


def state_dict(trainer: "Trainer") -> dict[str, Any]:
    return {
        **tensors(trainer),
        "callbacks": {name: callback.state_dict() for name, callback in trainer.callbacks.items()},
        "scaler": trainer.scaler.state_dict(),
        "step": trainer.step,
        "samples": trainer.samples,
        "seconds": trainer.seconds,
        "best": trainer.best,
        "validation": trainer.validation,
        "validated_step": trainer.validated_step,
        "quarantine": trainer.quarantine.state_dict(),
    }


def tensors(trainer: "Trainer") -> dict[str, Any]:
    """The large part of `state_dict`, live."""
    optimizer = optimizer_state(trainer.optimizer, trainer.module)
    return {"model": trainer.global_model.state_dict(), "optimizer": optimizer}


def rank_states(trainer: "Trainer") -> dict[str, Packed]:
    """On rank 0, what the callbacks of each rank keep of their own: a section a rank. A collective."""
    own = {name: state for name, callback in trainer.callbacks.items() if (state := callback.rank_state_dict())}
    if not own:
        return {}
    parts = pack(rank_section(trainer.rank), own)
    contents, files = (trainer.ranks.bring(part, trainer.heartbeat.beat) for part in parts)
    sections = enumerate(zip(contents, files, strict=True))
    return {rank_section(rank): Packed(json.loads(c.numpy().tobytes()), f.numpy().data) for rank, (c, f) in sections}


def rank_section(rank: int) -> str:
    return f"rank-{rank:05d}"


def manifest(trainer: "Trainer", rank_states: Mapping[str, Packed]) -> dict[str, Any]:
    measured = trainer.validation if trainer.validated_step == trainer.step else {}
    return {
        "run_dir": str(trainer.run_dir),
        "samples": trainer.samples,
        "world": trainer.world,
        "identity": trainer.plan.identity() | model_identity(trainer),
        "buckets": trainer.buckets,
        "ddp": trainer.ddp,
        "rank_states": sorted(rank_states[rank_section(0)].content) if rank_states else [],  # the callbacks with some
        "settings": plain(trainer.saver.settings),
        "metrics": {
            name: value for name, value in measured.items() if math.isfinite(value)
        },  # else no candidate for best
        "versions": versions(),
    }


def model_identity(trainer: "Trainer") -> dict[str, str]:
    shapes = "".join(f"{name} {tuple(p.shape)} {p.dtype};" for name, p in trainer.module.state_dict().items())
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {"model": hashlib.sha256(shapes.encode()).hexdigest(), "optimizer": type(optimizer).__name__}


def refuse_other_model(trainer: "Trainer", path: Path) -> None:
    """Raises:
    ConfigError: where the checkpoint is of another model or optimizer than the trainer's.
    """
    saved, own = trainer.plan.manifest["identity"], model_identity(trainer)
    if saved["model"] != own["model"]:
        raise ConfigError(
            f"trainer.resume={path}: is a checkpoint of another model (names, shapes or types of weights differ); "
            "set recipe.* back, or start anew with trainer.resume=null"
        )
    refuse_differences(saved, {"optimizer": own["optimizer"]}, trainer.options.accept)


def load(trainer: "Trainer", path: Path) -> None:
    """Put back what `save` took; the checkpoint was verified when it was chosen, and is of this model."""
    saved, own = trainer.plan.manifest, model_identity(trainer)
    own_section, other_world = rank_section(trainer.rank), saved["world"] != trainer.world
    state = load_state(path, saved["files"], lambda name: other_world or name == own_section or name[:5] != "rank-")
    for key in ("step", "samples"):  # data goes by the manifest's, counters by the state's
        if state.get(key) != saved[key]:
            told = f"trainer.resume={path}: state.json is at {key} {state.get(key)}, its manifest at {saved[key]}"
            raise Damaged(f"{told}: not what one run has written; go on from another checkpoint")
    trainer.module.load_state_dict(state["model"])
    if saved["identity"]["optimizer"] == own["optimizer"]:  # else its state is left behind, as accepted
        load_optimizer_state(trainer.optimizer, trainer.module, state["optimizer"])
    if state["scaler"]:  # empty where the run was not in fp16
        trainer.scaler.load_state_dict(state["scaler"])
    for name in ("step", "samples", "seconds", "best", "validation", "validated_step"):
        setattr(trainer, name, state[name])
    trainer.saver.best = trainer.best
    trainer.quarantine.load_state_dict(state["quarantine"])
    for name, callback in trainer.callbacks.items():
        if name in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][name])
    rank_states = [state[rank_section(rank)] for rank in range(saved["world"]) if rank_section(rank) in state]
    for name, callback in trainer.callbacks.items():
        states = [each[name] for each in rank_states if name in each]
        if states:
            callback.load_rank_state_dict(callback.merge_rank_states(states) if other_world else states[0])
            if trainer.world == 1 and callback.communicates:
                log.warning("resume: %s has nothing to do with one rank; what it had kept back is left out", name)
    log.info("resumed from %s at step %d, sample %d", path, trainer.step, trainer.samples)
    for difference in differences(saved, manifest(trainer, {})):
        log.warning("resume: %s", difference)
    if other_world:
        log.info(
            "resume: %d ranks then, %d now: the same samples, but not the same bits", saved["world"], trainer.world
        )
    elif saved["buckets"] != trainer.buckets:
        log.warning("resume: DDP laid its buckets out differently, so sums may differ in their last bits")
    if trainer.plan.order is None:
        log.info("resume: this recipe's data is an iterable of batches; the %d steps before are replayed", trainer.step)


def leave_newer(trainer: "Trainer") -> None:
    """What was written after the step from which this run goes on counts no more. Not before it is sure to begin."""
    if trainer.rank:
        return
    assert trainer.saver.attempt is not None
    refuse_superseded(saved_in(trainer), trainer.saver.attempt)
    trainer.quarantine.begin()
    if trainer.plan.resumed and (aside := retention.set_aside(saved_in(trainer), trainer.step)):
        log.warning("resume: another history begins at step %d; set aside: %s", trainer.step, ", ".join(aside))


def validate_again(trainer: "Trainer") -> None:
    """Before the first step: what a signal has ended, or left out, at the step of the checkpoint. A collective."""
    due = trainer.plan.resumed and trainer.plan.validates_at(trainer.step) and not trainer.stop_reason
    if due and trainer.validated_step != trainer.step and trainer.validate():
        trainer.saver.save()


def note_best(trainer: "Trainer") -> bool:
    """Remember the best validation, by `checkpoint.keep_best` or else the loss; whether it wants a checkpoint. A
    collective: only rank 0 knows whether one could be written."""
    trainer.best = trainer.ranks.first(trainer.best)
    wanted = trainer.options.checkpoint.keep_best or next((m for m in trainer.validation if m == "val/loss"), None)
    if wanted is None:
        return False
    name, sign = retention.parse_best(wanted)
    value = trainer.validation.get(name, math.nan)
    before = [trainer.best["value"]] if trainer.best.get("metric") == wanted else []  # else of another setting
    if not math.isfinite(value) or any(sign * value >= sign * best for best in before):
        return False
    trainer.best = {"metric": wanted, "value": value, "step": trainer.step}
    return trainer.options.checkpoint.keep_best is not None
