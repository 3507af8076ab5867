"""Echelon, from Python."""

from typing import Any

from torch import Tensor, nn

from echelon import Callback, CheckpointOptions, DataOptions, Options, Trainer
from scripts.bench.peers import task
from trainer.loggers.metrics_file import MetricsFile


class Tick(Callback):  # bench
    def on_step_end(self, trainer: Any) -> None:  # bench
        task.tick()  # bench


class Recipe:
    def model(self) -> nn.Module:
        return task.model()

    def data(self, split: str) -> Any:
        return task.Random() if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch)["loss"]


Trainer(
    Recipe(),
    {"tick": Tick(), "metrics_file": MetricsFile()},
    task.optimizer,
    batch=task.BATCH * task.WORLD,
    data=DataOptions(workers=0),
    options=Options(
        max_steps=task.STEPS,
        precision="fp32",
        run_dir="run",
        resume="auto",
        log_every_steps=task.LOG_EVERY,
        checkpoint=CheckpointOptions(every_steps=task.SAVE_AT),
    ),
).fit()
