"""A LightningModule trained by Echelon and by Lightning's own Trainer, on one rank, with the loader's batches."""

from typing import Any

import torch

from recipes.lightning import Lightning, LightningHooks
from trainer.config.options import DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

SILENT: dict[str, Any] = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1,
}  # fmt: skip


def make_echelon(
    module: Any, data: Any, batch: int = 4, callbacks: Any = None, place: Place | None = None, **options: Any
) -> Trainer:
    recipe = Lightning(module, data, batches=True)
    own = {"lightning": LightningHooks(), **(callbacks or {})}
    return Trainer(
        recipe, own, recipe.optimizer, recipe.schedule, batch=batch, place=place,
        options=Options(**{"log_every_steps": 1, "seed": 7, "run_dir": "runs/r", "timeout_s": 60.0, **options}),
        data=DataOptions(workers=0),
    )  # fmt: skip


def by_echelon(module: Any, data: Any, batch: int = 4, callbacks: Any = None, **options: Any) -> Trainer:
    trainer = make_echelon(module, data, batch, callbacks, **options)
    trainer.fit()
    return trainer


def by_lightning(module: Any, data: Any, **options: Any) -> Any:
    """Return Lightning's trainer after its `fit`; `lightning_module` has the weights."""
    import lightning as L

    torch.manual_seed(7)
    trainer = L.Trainer(**{**SILENT, **options})
    trainer.fit(module(), data)
    return trainer


def same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    """Return whether all weights have the same bits."""
    own, other = ours.state_dict(), theirs.state_dict()
    return own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
