"""The end of a run: the export, summary.json, and the lines that say where everything is."""

import platform
import shlex
from typing import TYPE_CHECKING, Any

import torch

from trainer.run import log, versions, write_json

if TYPE_CHECKING:
    from trainer.trainer import Trainer

REASONS = {"max_steps": "the last step is done", "signal": "a signal asked for it"}


def report(trainer: "Trainer") -> None:
    """Rank 0 only."""
    if trainer.rank:
        return
    export = (
        trainer.run_dir / "export" if trainer.stop_reason != "signal" and hasattr(trainer.recipe, "export") else None
    )
    if export is not None:
        export.mkdir(exist_ok=True)
        trainer.recipe.export(trainer.eval_model, export)
    task = trainer.recipe.summary() if hasattr(trainer.recipe, "summary") else {}
    numbers = trainer.last_metrics | trainer.validation | task
    write_json(trainer.run_dir / "summary.json", {**numbers, **circumstances(trainer)})
    reason = REASONS.get(trainer.stop_reason, trainer.stop_reason)
    log.info("stopped at step %d after %.1f s: %s", trainer.step, trainer.seconds, reason)
    log.info("%s", "  ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    log.info("run         %s", trainer.run_dir)
    log.info("checkpoint  %s", trainer.checkpoint)
    if export is not None:
        log.info("export      %s", export)
    if trainer.stop_reason == "signal":
        kept = [word for word in trainer.overrides if not word.startswith("trainer.resume=")]
        assert trainer.checkpoint is not None
        resume = f"trainer.resume={trainer.checkpoint.parent}"  # last.pt may be another run's by then
        log.info("go on with  python -m trainer.main %s", shlex.join([*kept, resume]))


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
        "checkpoint": str(trainer.checkpoint),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads a rank)"
