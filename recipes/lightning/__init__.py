"""A LightningModule and its data, as they are, trained by Echelon."""

from recipes.lightning.callback import LightningHooks
from recipes.lightning.recipe import Lightning

__all__ = ["Lightning", "LightningHooks"]
