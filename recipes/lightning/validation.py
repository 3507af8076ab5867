"""A validation by a LightningModule: its hooks, what it logs, its metrics of torchmetrics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recipes.lightning.attached import AttachedTrainer, Logged, mean_of, short_name
from trainer.comm.ranks import Ranks
from trainer.errors import ConfigError


class Validation:
    """One validation after the other, of this rank's batches.

    Attributes:
        index: Of the next batch.
        metrics: The place in the module of each metric of torchmetrics that was logged, by name.
    """

    def __init__(self, view: AttachedTrainer) -> None:
        self.view, self.index, self.begun = view, 0, False
        self.metrics: dict[str, str] = {}
        self.training = view.logged

    def begin(self, module: Any) -> None:
        """Call the module's hooks before the first batch; collect what is logged from here on."""
        self.view.logged = Logged()
        if self.begun:
            return
        self.begun, self.index, self.metrics = True, 0, {}
        self.view.training, self.view.validating = False, True
        module.on_validation_start()
        module.on_validation_epoch_start()

    def take(self, module: Any, output: Any) -> dict[str, tuple[Tensor, int]]:
        """Return name -> sum and weight of what a batch has logged, or else of the numbers in `output`.

        Raises:
            ConfigError: There is neither.
        """
        logged, self.index = self.view.logged, self.index + 1
        if not logged.sums:
            found = output if isinstance(output, Mapping) else {"loss": output}
            for name, value in found.items():
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                    logged.add(name, value, self.view.batch_size)
        places = {id(metric): place for place, metric in module.named_modules()}
        self.metrics |= {name: places[id(metric)] for name, metric in logged.metrics.items() if id(metric) in places}
        self.view.logged = self.training
        if not logged.sums:
            raise ConfigError("validation_step: logs nothing and returns no number; log a metric by self.log")
        return {name: (torch.as_tensor(total), weight) for name, (total, weight) in logged.sums.items()}

    @torch.no_grad()
    def end(self, module: Any, ranks: Ranks) -> dict[str, float]:
        """Call the hooks after the last batch; return metrics of all ranks. A collective."""
        self.begin(module)  # a rank may have had no batch
        module.on_validation_epoch_end()
        own, places = self.view.logged.numbers(), self.metrics
        reports = ranks.gather([own, places])
        found = mean_of([numbers for numbers, _ in reports])
        for name, place in {name: place for _, each in reports for name, place in each.items()}.items():
            metric: Any = module.get_submodule(place)
            value = metric.compute()
            if isinstance(value, Mapping):  # of a MetricCollection
                found.update((short_name(str(key)), float(each)) for key, each in value.items())
                found.pop(name, None)
            else:
                found[name] = float(value)
            metric.reset()
        module.on_validation_end()
        self.view.logged, self.begun = self.training, False
        self.view.training, self.view.validating = True, False
        return {f"val/{name}": value for name, value in found.items()}
