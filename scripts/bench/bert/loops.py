"""The trainers that are compared: each trains the model of a cell with AdamW, and ticks the clock after each step.

No loop validates, clips gradients or saves a checkpoint. Each loads the same samples by two workers, into pinned memory
on a GPU, and reads the loss every 50 steps.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from scripts.bench.bert.cells import Cell
from scripts.bench.bert.recipe import RandomText
from scripts.bench.report import installed
from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.loggers.metrics_file import MetricsFile
from trainer.loggers.progress import Progress
from trainer.monitors.memory.callback import Memory
from trainer.monitors.throughput import Throughput
from trainer.optim.factories import adamw
from trainer.optim.groups import parameter_groups
from trainer.process.environment import Place
from trainer.trainer import Trainer

LOG_EVERY = 50
MAX_STEPS = 100_000  # of a run that is ended sooner
LR = 1e-4


@dataclass(frozen=True)
class Job:
    """A cell on a device, with all that a loop needs."""

    cell: Cell
    recipe: RandomText
    device: torch.device
    folder: Path
    tick: Callable[[], None]  # at the end of each step

    @property
    def steps(self) -> int:
        return self.cell.warm + self.cell.timed

    @property
    def workers(self) -> int:
        return 2 if self.device.type == "cuda" else 0

    def loader(self) -> DataLoader[Any]:
        """Return batches for as many steps as wanted."""
        data = self.recipe.data("train")
        sampler = torch.randint(len(data), (self.steps * self.cell.micro,)).tolist()
        return DataLoader(
            data, self.cell.micro, sampler=sampler, num_workers=self.workers, pin_memory=self.device.type == "cuda"
        )

    def model(self) -> nn.Module:
        """Return the model on the device, compiled if the cell wants that."""
        model = self.recipe.model().to(self.device).train()
        if self.cell.compiled == "whole":
            model.compile(backend=self.cell.backend)
        return model


def bare(job: Job) -> None:
    model, losses = job.model(), []
    optimizer = adamw(parameter_groups(model), lr=LR)
    for step, batch in enumerate(job.loader(), start=1):
        batch = {key: value.to(job.device, non_blocking=True) for key, value in batch.items()}
        with torch.autocast(job.device.type, torch.bfloat16):
            loss = job.recipe.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            losses.append(loss.item())
        job.tick()


class Ended(Exception):
    """Ends a run after what is measured, and before its last checkpoint."""


class Ticks(Callback):
    def __init__(self, tick: Callable[[], None], steps: int) -> None:
        self.tick, self.steps = tick, steps

    def on_step_end(self, trainer: Any) -> None:
        self.tick()
        if trainer.step == self.steps:
            raise Ended


def echelon(job: Job) -> None:
    train(job, Ticks(job.tick, job.steps), CheckpointOptions(every_steps=None))


def train(job: Job, watch: Callback, checkpoint: CheckpointOptions) -> None:
    """Train with Echelon until `watch` raises `Ended`, with the default observers but TensorBoard.

    Raises:
        ConfigError: Echelon can't do what the cell wants.
    """
    cell = job.cell
    formats = get_args(get_type_hints(Options)["precision"])
    if cell.precision not in formats:
        raise ConfigError(f"trainer.precision={cell.precision}: is not one of {', '.join(formats)}")
    options: dict[str, Any] = {
        "max_steps": MAX_STEPS, "precision": cell.precision, "log_every_steps": LOG_EVERY,
        "run_dir": str(job.folder / "run"), "accelerator": job.device.type, "checkpoint": checkpoint,
    }  # fmt: skip
    trainer = Trainer(
        job.recipe, {**observers(), **changes(cell), "watch": watch}, lambda groups: adamw(groups, lr=LR),
        batch=cell.micro, place=Place(), options=Options(**options), data=DataOptions(workers=job.workers),
    )  # fmt: skip
    with suppress(Ended):
        trainer.fit()


def observers() -> dict[str, Callback]:
    return {"progress": Progress(), "metrics_file": MetricsFile(), "throughput": Throughput(), "memory": Memory()}


def changes(cell: Cell) -> dict[str, Callback]:
    """Return the callbacks that a cell asks for."""
    found: dict[str, Callback] = {}
    if cell.compiled != "no":
        found["compile"] = Compile(whole=cell.compiled == "whole", backend=cell.backend)
    if cell.recompute.startswith("budget="):
        found["activation_checkpoint"] = ActivationCheckpoint(budget=float(cell.recompute.removeprefix("budget=")))
    elif cell.recompute != "no":
        found["activation_checkpoint"] = ActivationCheckpoint(policy=cell.recompute)  # pyright: ignore[reportArgumentType]
    return found


class WithLoss(nn.Module):
    """The model with its loss, as Hugging Face's trainer wants it."""

    def __init__(self, recipe: RandomText) -> None:
        super().__init__()
        self.net, self.loss = recipe.model(), recipe.loss

    def forward(self, input_ids: Tensor, positions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.net, {"input_ids": input_ids, "positions": positions, "labels": labels})}


def hugging_face(job: Job) -> None:
    import transformers

    class Ticking(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            job.tick()

    cell, model, cpu = job.cell, WithLoss(job.recipe), job.device.type == "cpu"
    optimizer = adamw(parameter_groups(model.to(job.device)), lr=LR)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    compiles = {"torch_compile": True, "torch_compile_backend": cell.backend} if cell.compiled != "no" else {}
    arguments = transformers.TrainingArguments(
        str(job.folder), max_steps=job.steps, logging_steps=LOG_EVERY, max_grad_norm=0.0, bf16=True, use_cpu=cpu,
        per_device_train_batch_size=cell.micro, dataloader_num_workers=job.workers, dataloader_pin_memory=not cpu,
        remove_unused_columns=False, save_strategy="no", report_to="none", disable_tqdm=True, **compiles,
    )  # fmt: skip
    transformers.Trainer(
        model, arguments, data_collator=default_collate, train_dataset=job.recipe.data("train"),
        optimizers=(optimizer, constant), callbacks=[Ticking()],
    ).train()  # fmt: skip


def lightning(job: Job) -> None:
    import lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.loggers import CSVLogger  # pyright: ignore[reportMissingImports]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.model()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = job.recipe.loss(self.net, batch)
            self.log("train/loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            job.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(parameter_groups(self.net), lr=LR)

    lightning.Trainer(
        accelerator=job.device.type, devices=1, max_steps=job.steps, log_every_n_steps=LOG_EVERY,
        precision="bf16-mixed", logger=CSVLogger(job.folder),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), job.loader())  # fmt: skip


LOOPS: dict[str, tuple[Callable[[Job], None], tuple[str, ...]]] = {
    "bare loop": (bare, ()),
    "Echelon": (echelon, ()),
    "Hugging Face Trainer": (hugging_face, ("accelerate",)),
    "Lightning": (lightning, ("lightning",)),
}
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "torchao", "triton")


def missing(cell: Cell) -> str:
    """Return the packages that the cell's trainer needs and that are not installed, in words."""
    lacks = [package for package in LOOPS[cell.trainer][1] if not installed(package)]
    return f"needs {' and '.join(lacks)} (extra [peers])" if lacks else ""
