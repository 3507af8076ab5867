"""The training loops that are compared: each trains the same model, with the same optimizer, on the given batches.

No loop validates or saves a checkpoint. Each copies the loss to the CPU every 50 steps.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, Options
from trainer.loggers.metrics_file import MetricsFile
from trainer.loggers.progress import Progress
from trainer.loggers.tensorboard import TensorBoard
from trainer.monitors.advice.callback import Advice
from trainer.monitors.memory.callback import Memory
from trainer.monitors.step_timer import StepTimer
from trainer.monitors.throughput import Throughput
from trainer.optim.factories import adamw, sgd
from trainer.optim.groups import Groups, parameter_groups
from trainer.process.environment import Place
from trainer.trainer import Trainer

CPU, LOG_EVERY = torch.device("cpu"), 50
ALONE = Place()
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """A model that is trained with cross-entropy on `device`. Its batches are in host memory."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    samples: int  # in a batch
    optimizer: Callable[[Groups], Optimizer]
    device: torch.device = CPU

    def build(self) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = self.model().to(self.device)
        return model, self.optimizer(parameter_groups(model))

    def upload(self, batches: Batches) -> Batches:
        """Return the batches on the device, for a loop that copies them itself."""
        if self.device.type == "cpu":
            return batches
        return ((x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)) for x, y in batches)


MLP = Task(
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    batch=lambda: (torch.randn(32, 64), torch.randint(10, (32,))),
    samples=32,
    optimizer=partial(sgd, momentum=0.0),
)

# About 15 ms a step on one core.
TRANSFORMER = Task(
    model=lambda: nn.Sequential(
        *(nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)),
        nn.Flatten(0, 1),
        nn.Linear(64, 100),
    ),
    batch=lambda: (torch.randn(8, 64, 64), torch.randint(100, (512,))),
    samples=8,
    optimizer=adamw,
)


def bare(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    model, optimizer = task.build()
    train(model, optimizer, task.upload(batches))


def bare_in_one_group(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    model, _ = task.build()
    train(model, task.optimizer([{"params": list(model.parameters())}]), task.upload(batches))


def bare_ddp(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    """Train in the process group that exists."""
    model, optimizer = task.build()
    train(DistributedDataParallel(model), optimizer, task.upload(batches))


def train(model: nn.Module, optimizer: Optimizer, batches: Batches) -> None:
    losses = []
    for step, (x, y) in enumerate(batches, start=1):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            losses.append(loss.item())


class Recipe:
    """A task as Echelon wants it."""

    def __init__(self, task: Task, batches: Batches) -> None:
        self.task, self.batches = task, batches

    def model(self) -> nn.Module:
        return self.task.model()

    def data(self, split: str) -> Batches | None:
        return self.batches if split == "train" else None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)


def echelon(
    task: Task,
    batches: Batches,
    steps: int,
    folder: Path,
    callbacks: dict[str, Callback] | None = None,
    place: Place = ALONE,
) -> None:
    options = Options(
        max_steps=steps,
        accelerator="cuda" if task.device.type == "cuda" else "cpu",
        precision="fp32",
        log_every_steps=LOG_EVERY,
        run_dir=str(folder / "run"),
        timeout_s=60,
        checkpoint=CheckpointOptions(str(folder / "ckpt"), every_steps=None, every_minutes=None),
    )
    batch = task.samples * place.world
    Trainer(Recipe(task, batches), callbacks, task.optimizer, batch=batch, options=options, place=place).fit()


def echelon_observed(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    observers = (Progress(), TensorBoard(), MetricsFile(), Throughput(), Memory(), StepTimer(), Advice())
    callbacks: dict[str, Callback] = {type(observer).__name__: observer for observer in observers}
    echelon(task, batches, steps, folder, callbacks)


def echelon_timed(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    echelon(task, batches, steps, folder, {"step_timer": StepTimer()})


def fabric(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]
    from lightning.fabric.loggers import CSVLogger  # pyright: ignore[reportMissingImports]

    fabric = Fabric(accelerator=task.device.type, devices=1, loggers=CSVLogger(folder))
    model, optimizer = fabric.setup(*task.build())
    for step, (x, y) in enumerate(task.upload(batches), start=1):
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            fabric.log("train/loss", loss.item(), step)


def ignite(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    from ignite.engine import Engine, Events  # pyright: ignore[reportMissingImports]

    model, optimizer = task.build()
    losses = []

    def update(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def log(engine: Engine) -> None:
        losses.append(engine.state.output.item())

    engine = Engine(update)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=LOG_EVERY), log)
    engine.run(task.upload(batches), max_epochs=1, epoch_length=steps)


def accelerate(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=task.device.type == "cpu")
    model, optimizer = accelerator.prepare(*task.build())
    losses = []
    for step, (x, y) in enumerate(task.upload(batches), start=1):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            losses.append(loss.item())


def hugging_face(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    import transformers

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": cross_entropy(self.net(x), labels)}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return Named(batches)

    net, optimizer = task.build()
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, logging_steps=LOG_EVERY, max_grad_norm=0.0,
        use_cpu=task.device.type == "cpu",
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    Trainer(WithLoss(), arguments, optimizers=(optimizer, constant)).train()


@dataclass(frozen=True)
class Named:
    """Batches as keyword arguments of a model's `forward`."""

    batches: Batches

    def __iter__(self) -> Any:
        return ({"x": x, "labels": y} for x, y in self.batches)


def lightning(task: Task, batches: Batches, steps: int, folder: Path) -> None:
    import lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.loggers import CSVLogger  # pyright: ignore[reportMissingImports]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.optimizer = task.build()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> Optimizer:
            return self.optimizer

    lightning.Trainer(
        accelerator=task.device.type, devices=1, max_steps=steps, log_every_n_steps=LOG_EVERY, logger=CSVLogger(folder),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), batches)  # fmt: skip
