"""Ends a run: writes summary.json, exports the model, and logs all paths and the command that resumes."""

import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.locate import folder, step_of
from trainer.checkpoint.pretrained import load_weights
from trainer.checks.callback import owner
from trainer.checks.recipe import call_summary
from trainer.comm.device import has_failed
from trainer.comm.phases import Phase
from trainer.comm.ranks import in_collective
from trainer.context import Context
from trainer.errors import CONFIG, NOT_FINITE, exit_code
from trainer.files import usual_permissions, write_json
from trainer.log import doing, log
from trainer.parallel.meta import on_host
from trainer.process.calling import echelon
from trainer.process.crash import note_crash, read_summary
from trainer.process.environment import detect
from trainer.redact import HIDDEN
from trainer.run_dir import empty_log, versions

FIRST = 5  # the most samples that a message names
PARTS = [phase.name.lower() for phase in Phase]
OF_STEP = {f"time/{name}" for name in (*PARTS, "spread", "slowest_rank", "data_max", "communication_min")}
LEAST = 0.01  # of a step: the smallest share that the last lines show
OURS = ("", "echelon")  # launchers for which our own command starts all ranks
ENDS = {  # all other stop reasons count as finished
    "max_steps": ("finished", ""),
    "signal": ("stopped", ": a signal asked for it"),
    NOT_FINITE: ("stopped", ": the loss or the weights are not finite"),
}


def report(trainer: Context) -> None:
    """Write `trainer.summary` to its file, log the result, and export the model. Called on rank 0 only."""
    if trainer.rank:
        return
    task = call_summary(trainer.recipe)
    file = trainer.run_dir / "summary.json"
    numbers = (trainer.last_metrics or earlier(trainer.run_dir, trainer.step)) | trainer.validation | task
    exports, export = hasattr(trainer.recipe, "export"), trainer.run_dir / "export"
    averaged = trainer.eval_model is not trainer.module
    saved = trainer.checkpoint is not None and step_of(trainer.checkpoint) == trainer.step
    has = trainer.strategy.whole or (saved and not averaged)  # else rank 0 reads the checkpoint
    exports_now = exports and trainer.stop_reason not in ("signal", NOT_FINITE) and has
    trainer.summary = {**numbers, **circumstances(trainer)}
    if exports_now:
        trainer.summary["export"] = None  # not yet
    try:
        write_json(file, trainer.summary)
    except OSError as error:
        if trainer.stop_reason != "signal":  # a stopped run resumes from its checkpoint
            raise
        log.warning("%s: can't be written: %s", file, error.strerror)
    how, why = ENDS.get(trainer.stop_reason, ("finished", f": {trainer.stop_reason}"))
    log.info("%s at step %d after %.1f s%s", how, trainer.step, trainer.seconds, why)
    for group, line in grouped(numbers).items():
        log.info("%-11s %s", group, line)
    log.info("run         %s", trainer.run_dir)
    log.info("checkpoint  %s", trainer.checkpoint or "none")
    if trainer.best:
        log.info("best        %s", best_in_words(trainer.best, trainer.checkpoint))
    if trainer.stop_reason == "signal" and trainer.checkpoint is not None:
        log.info("resume with %s", go_on(trainer.command.argv, trainer.checkpoint.parent))
        if short := resume(trainer):
            log.info("or with     %s", short)
    if exports_now:
        export.mkdir(exist_ok=True)
        log.info("exporting to %s", export)  # this may take minutes
        with doing("exporting"), usual_permissions(export):
            trainer.recipe.export(exported(trainer).eval(), export)
        trainer.summary["export"] = str(export)
        write_json(file, trainer.summary)
        log.info("export      %s", export)
    elif exports and trainer.checkpoint is not None:  # the command reads an average from the files of all ranks
        log.info("export with %s", export_from(trainer, trainer.checkpoint, export))


def best_in_words(best: Mapping[str, Any], checkpoint: Path | None) -> str:
    """Return the best validation, and its checkpoint if that is kept."""
    kept = checkpoint and folder(checkpoint.parent, best["step"])
    where = f", in {kept}" if kept and kept.is_dir() else ", not kept" if kept else ""
    return f"{best['metric']} {readable(best['value'])} at step {best['step']}{where}"


def exported(trainer: Context) -> nn.Module:
    """Return the validated model, or a new one with the last checkpoint's weights if this rank has only a part."""
    if trainer.strategy.whole:
        return trainer.eval_model
    model = on_host(trainer.recipe.model())
    load_weights(model, str(trainer.checkpoint))
    return model


def report_error(
    trainer: Context, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Record the error that ends a run, for its peers, launcher and folder. Used as an `__exit__`."""
    if error is None:
        return
    tell_place(error, trainer)
    for call in trainer.hooks["on_error"] if trainer.fitted else ():
        try:
            call(trainer, error)
        except Exception:
            log.exception("%s.on_error failed", owner(call, trainer.callbacks))  # peers still wait for the report
    trainer.command.on_error(error)
    refused = not trainer.accepted and exit_code(error) != 1
    logs = trainer.run_dir / "logs"
    if isinstance(error, Exception) and not (refused or trainer.ended):
        follows = in_collective(error)
        note_crash(trainer.run_dir, error, trainer.rank, trainer.world, done(trainer), follows=follows)
        if trainer.rank == 0 and not (trainer.run_dir / "config.yaml").exists():  # crashed before it was accepted
            with suppress(OSError):
                trainer.command.save_config(trainer.run_dir)
    elif refused and exit_code(error) == CONFIG and trainer.world == 1:  # other ranks may still write
        empty_log()
    trainer.ranks.note_failure(kind, logs)
    if has_failed(trainer.device):
        trainer.command.end_failed(error)


def done(trainer: Context) -> dict[str, int]:
    """Return the completed steps and samples; before the state is loaded, the checkpoint's."""
    saved = {} if trainer.state.loaded else trainer.plan.manifest
    return {"steps": saved.get("step", trainer.step), "samples": saved.get("samples", trainer.samples)}


def tell_place(error: Any, trainer: Context) -> None:
    """Attach the run's batch and the current micro-batch's samples to an error, for `errors.message`.

    Samples are left out for a failed collective, which they do not cause.
    """
    refs = getattr(error, "refs", None)
    error.given = f"batch={trainer.batch}, micro_batch={len(refs) if refs else trainer.plan.micro}"
    if refs is None or in_collective(error):
        return
    first = [trainer.plan.source.where(ref) for ref in refs[:FIRST]]
    more = f" and {len(refs) - FIRST} more" if len(refs) > FIRST else ""
    on = f", on {', '.join(first)}{more}" if refs else ""
    error.place = f"in {'a rehearsal before step 1' if trainer.rehearsing else f'step {trainer.step + 1}'}{on}"


def go_on(argv: Sequence[str] | None, saved: Path) -> str:
    """Return the command that resumes a run from its checkpoint folder, because `last.pt` may be another run's later.

    If a launcher started the ranks, the command includes it. Without a command line, return only the setting.
    """
    if argv is None:
        return f"Options(resume='{saved}')"
    words = [*(word for word in argv if not word.startswith("trainer.resume=")), f"trainer.resume={quoted(saved)}"]
    launcher = detect(os.environ).launcher
    if launcher in OURS:
        return shlex.join([*echelon(), *words])
    return f"the same {launcher} ... {shlex.join(['-m', 'trainer.main', *words])}"


def resume(trainer: Context) -> str:
    """Return the short command that resumes a run; empty if it needs a launcher or a setting that is not stored."""
    file = trainer.run_dir / "config.yaml"
    if trainer.command.argv is None or detect(os.environ).launcher not in OURS or not file.exists():
        return ""
    return "" if HIDDEN in file.read_text() else shlex.join([*echelon(), "resume", named(trainer.run_dir)])


def named(path: Path) -> str:
    """Return the path as an argument that can't be mistaken for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def quoted(path: Path) -> str:
    """Quote the path as a value for Hydra."""
    plain = re.fullmatch(r"[\w./@:+-][\w./@:+ -]*", str(path), re.ASCII)
    if plain:
        return str(path)
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + found[2].replace('"', r"\""), str(path))
    return f'"{escaped}"'


def export_from(trainer: Context, checkpoint: Path, folder: Path) -> str:
    """Return the command that exports a checkpoint, with the settings that an export does not read from a config.

    Without the run's config, return the equivalent in Python.
    """
    if not (trainer.run_dir / "config.yaml").exists():
        if trainer.stop_reason == "signal":
            return "the run's end: it exports after a resume"
        return f"recipe.export, of a Trainer whose ranks have the whole model, with Options(resume='{checkpoint}')"
    allow = trainer.options.allow_targets
    trusted = [f"trainer.allow_targets=[{','.join(allow)}]"] if allow else []
    paths = {name: getattr(trainer.recipe, name, None) for name in getattr(trainer.recipe, "paths", ())}
    trusted += [f"recipe.{name}={value}" for name, value in paths.items() if value is not None]
    return shlex.join([*echelon(), "export", str(checkpoint), str(folder), *trusted])


def earlier(run_dir: Path, step: int) -> dict[str, float]:
    """Return the metrics in a finished run's summary, because resuming it makes no step and measures nothing."""
    summary = read_summary(run_dir / "summary.json")
    if summary.get("steps") != step:
        return {}
    return {
        name: value
        for name, value in summary.items()
        if name.startswith(("train/", "perf/", "time/")) and value is not None
    }


def grouped(numbers: Mapping[str, float]) -> dict[str, str]:
    """Group metrics by the part before the slash: each group's names and values in one line."""
    lines: dict[str, list[str]] = {}
    for name, value in numbers.items():
        group, _, rest = name.rpartition("/")
        if name == "time/step":
            lines.setdefault(group, [])[:0] = step_in_words(numbers)
        elif name not in OF_STEP or "time/step" not in numbers:
            lines.setdefault(group or "task", []).append(f"{rest} {readable(value)}")
    return {group: "  ".join(line) for group, line in lines.items()}


def step_in_words(numbers: Mapping[str, float]) -> list[str]:
    """Return the duration of a step, its parts of at least 1 %, and the slowest rank if others wait that long."""
    step = numbers["time/step"]
    parts = sorted(((numbers.get(f"time/{part}", 0.0), part) for part in PARTS), reverse=True)
    shares = [f"{part} {seconds / step:.0%}" for seconds, part in parts if seconds >= LEAST * step > 0]
    words = [f"{readable(step)} s a step" if step >= 10 else f"{readable(1e3 * step)} ms a step", ", ".join(shares)]
    spread, slowest = numbers.get("time/spread", 0.0), numbers.get("time/slowest_rank")
    if spread >= LEAST and slowest is not None:
        words.append(f"rank {slowest:.0f} is the slowest, by {spread:.0%}")
    return list(filter(None, words))


def readable(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def circumstances(trainer: Context) -> dict[str, Any]:
    return {
        "best": trainer.best,
        "steps": trainer.step,
        "samples": trainer.samples,
        "seconds": round(trainer.seconds, 3),
        "stopped": trainer.stop_reason,
        "ranks": trainer.world,
        "device": device_name(trainer.device),
        "precision": trainer.precision.label,
        "checkpoint": trainer.checkpoint and str(trainer.checkpoint),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads a rank)"
