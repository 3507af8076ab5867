"""The end of a run: summary.json, the export, and the lines that say where everything is and how to go on."""

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.files import apply_umask, write_json
from trainer.log import log
from trainer.process.environment import detect
from trainer.run_dir import versions

if TYPE_CHECKING:
    from trainer.trainer import Trainer

REASONS = {"max_steps": "the last step is done", "signal": "a signal asked for it"}


def report(trainer: "Trainer") -> None:
    """Rank 0 only."""
    if trainer.rank:
        return
    task = trainer.recipe.summary() if hasattr(trainer.recipe, "summary") else {}
    file = trainer.run_dir / "summary.json"
    numbers = (trainer.last_metrics or earlier(file, trainer.step)) | trainer.validation | task
    try:
        write_json(file, {**numbers, **circumstances(trainer)})
    except OSError as error:
        if trainer.stop_reason != "signal":  # else it goes on, and there is a checkpoint
            raise
        log.warning("%s is not written: %s", file, error.strerror)
    reason = REASONS.get(trainer.stop_reason, trainer.stop_reason)
    log.info("stopped at step %d after %.1f s: %s", trainer.step, trainer.seconds, reason)
    for group, told in grouped(numbers).items():
        log.info("%-11s %s", group, told)
    log.info("run         %s", trainer.run_dir)
    log.info("checkpoint  %s", trainer.checkpoint or "none")
    exports, export = hasattr(trainer.recipe, "export"), trainer.run_dir / "export"
    if trainer.stop_reason != "signal":
        if exports:
            export.mkdir(exist_ok=True)
            trainer.recipe.export(trainer.eval_model.eval(), export)
            apply_umask(export)
            log.info("export      %s", export)
    elif trainer.checkpoint is not None:
        log.info("go on with  %s", go_on(trainer.typed, trainer.checkpoint.parent))
        if exports:
            log.info("export with %s", export_from(trainer.checkpoint, export, trainer.options.allow_targets))


def go_on(typed: Sequence[str] | None, saved: Path) -> str:
    """What continues a run from its folder of checkpoints: `last.pt` may be another run's by then.

    Where someone else has started the ranks, that command is theirs; without `typed` the setting is all that we know.
    """
    resume = f"trainer.resume={saved}"
    if typed is None:
        return resume
    words = ["-m", "trainer.main", *(word for word in typed if not word.startswith("trainer.resume=")), resume]
    launcher = detect(os.environ).launcher
    ours = launcher in ("", "echelon")
    return shlex.join([this_python(), *words]) if ours else f"the same {launcher} ... {shlex.join(words)}"


def export_from(checkpoint: Path, folder: Path, allow: list[str]) -> str:
    """The command that exports a checkpoint."""
    trusted = [f"trainer.allow_targets=[{','.join(allow)}]"] if allow else []
    return shlex.join([this_python(), "-m", "trainer.tools.export", str(checkpoint), str(folder), *trusted])


def this_python() -> str:
    """This interpreter, as short as works here. Links of its name lead out of an environment, so none is followed."""
    own = Path(os.path.realpath(os.path.dirname(sys.executable)), os.path.basename(sys.executable))
    if own.is_relative_to(here := Path.cwd()):
        return os.path.join(".", own.name) if own.parent == here else str(own.relative_to(here))
    found = shutil.which("python") or ""
    same = os.path.realpath(os.path.dirname(found)) == str(own.parent) and os.path.samefile(found, own)
    return "python" if same else sys.executable


def earlier(file: Path, step: int) -> dict[str, float]:
    """The numbers of a run that a resume found at its end, so made no step: as that run's summary has them."""
    summary = json.loads(file.read_text()) if file.exists() else {}
    if summary.get("steps") != step:
        return {}
    return {
        name: value for name, value in summary.items() if name.startswith(("train/", "perf/")) and value is not None
    }


def grouped(numbers: Mapping[str, float]) -> dict[str, str]:
    """What stands before the slash of a name -> its names and values in one line."""
    lines: dict[str, list[str]] = {}
    for name, value in numbers.items():
        group, _, rest = name.rpartition("/")
        lines.setdefault(group or "task", []).append(f"{rest} {readable(value)}")
    return {group: "  ".join(line) for group, line in lines.items()}


def readable(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def circumstances(trainer: "Trainer") -> dict[str, Any]:
    return {
        "best": trainer.best,
        "steps": trainer.step,
        "samples": trainer.samples,
        "seconds": round(trainer.seconds, 3),
        "stopped": trainer.stop_reason,
        "ranks": trainer.world,
        "device": device_name(trainer.device),
        "precision": trainer.precision.name,
        "checkpoint": trainer.checkpoint and str(trainer.checkpoint),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads a rank)"
