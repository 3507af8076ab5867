"""A validation by a LightningModule: its hooks, what it logs, its metrics of torchmetrics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recipes.lightning.attached import AttachedTrainer, Logged
from trainer.errors import ConfigError


class Validation:
    """One validation after the other, of this rank's batches.

    Attributes:
        index: Of the next batch.
        names: What is logged.
    """

    def __init__(self, view: AttachedTrainer) -> None:
        self.view, self.index, self.begun = view, 0, False
        self.names: set[str] = set()
        self.training = view.logged

    def begin(self, module: Any) -> None:
        """Call the module's hooks before the first batch; collect what is logged from here on."""
        self.view.logged = Logged()
        if self.begun:
            return
        self.begun, self.index, self.names = True, 0, set()
        self.view.training, self.view.validating = False, True
        module.on_validation_start()
        module.on_validation_epoch_start()

    def take(self, output: Any) -> dict[str, Any]:
        """Return what a batch has logged, or else the numbers in `output`, which is no error if there are none."""
        logged, self.index = self.view.logged, self.index + 1
        if not logged.sums:
            found = output if isinstance(output, Mapping) else {"loss": output}
            for name, value in found.items():
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                    logged.add(name, value, self.view.batch_size, "validation_step: {!r} of what it returns")
        return self._metrics()

    def end(self, module: Any) -> dict[str, Any]:
        """Call the hooks after the last batch; return what they have logged. A number is the mean over ranks.

        Raises:
            ConfigError: Batches have come, and nothing was logged.
        """
        self.begin(module)  # a rank may have had no batch
        self.view.batch_size = 1
        module.on_validation_epoch_end()
        found = self._metrics()
        module.on_validation_end()
        self.begun = False
        self.view.training, self.view.validating = True, False
        if self.index and not self.names:
            raise ConfigError("validation_step: logs nothing and returns no number; log a metric by self.log")
        return found

    def _metrics(self) -> dict[str, Any]:
        """Return name -> sum and weight, or a metric of torchmetrics."""
        logged, self.view.logged = self.view.logged, self.training
        sums = {name: (torch.as_tensor(total), weight) for name, (total, weight) in logged.sums.items()}
        self.names |= sums.keys()
        return sums | logged.metrics
