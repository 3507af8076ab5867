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
    done = trainer.stop_reason != "signal"
    if done and hasattr(trainer.recipe, "export"):
        folder = trainer.run_dir / "export"
        folder.mkdir(exist_ok=True)
        trainer.recipe.export(trainer.eval_model, folder)
    task = trainer.recipe.summary() if hasattr(trainer.recipe, "summary") else {}
    summary: dict[str, Any] = {
        **trainer.last_metrics,
        **trainer.validation,
        **task,
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
    write_json(trainer.run_dir / "summary.json", summary)
    numbers = "  ".join(
        f"{name} {value:.4g}" for name, value in (trainer.last_metrics | trainer.validation | task).items()
    )
    log.info(
        "stopped at step %d after %.1f s: %s",
        trainer.step,
        trainer.seconds,
        REASONS.get(trainer.stop_reason, trainer.stop_reason),
    )
    if numbers:
        log.info("%s", numbers)
    log.info("run         %s", trainer.run_dir)
    log.info("checkpoint  %s", trainer.checkpoint)
    if done and hasattr(trainer.recipe, "export"):
        log.info("export      %s", trainer.run_dir / "export")
    if not done:
        kept = [word for word in trainer.overrides if not word.startswith("trainer.resume=")]
        link = f"trainer.resume={trainer.options.checkpoint.dir}/last.pt"
        log.info("go on with  python -m trainer.main %s", shlex.join([*kept, link]))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads a rank)"
