"""The trainers that are compared: each trains the same job, with the same optimizer.

No loop validates, clips gradients or saves a checkpoint. Each copies the loss to the CPU every 50 steps.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scripts.bench.hosts import fit
from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.loggers.metrics_file import MetricsFile
from trainer.loggers.progress import Progress
from trainer.monitors.memory.callback import Memory
from trainer.monitors.throughput import Throughput
from trainer.optim.groups import Groups, parameter_groups
from trainer.parallel.blocks import longest_list
from trainer.process.environment import Place
from trainer.trainer import Trainer

LOG_EVERY = 50
CPU, ALONE = torch.device("cpu"), Place()
Batch = dict[str, Tensor]
PACKAGES = {  # that the trainers need
    "Fabric": ("lightning",),
    "ignite": ("pytorch-ignite",),
    "Accelerate": ("accelerate",),
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "Lightning": ("lightning",),
}


@dataclass(frozen=True)
class Job:
    recipe: Any
    batches: Callable[[], Iterable[Batch]]  # in host memory, for the loops that take none from the recipe
    batch: int  # samples
    steps: int
    folder: Path
    optimizer: Callable[[Groups], Optimizer]
    device: torch.device = CPU
    tick: Callable[[], None] = lambda: None  # at the end of each step
    precision: str = "fp32"
    backend: str = ""  # of torch.compile; empty: eager
    workers: int = 0
    blocks: bool = False  # compile each block instead of the whole model
    mode: str | None = None  # of Inductor

    def build(self, groups: Callable[[nn.Module], Groups] = parameter_groups) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = self.recipe.model().to(self.device).train()
        return model, self.optimizer(groups(model))

    def compiled(self, model: nn.Module) -> nn.Module:
        for module in (longest_list(model) if self.blocks else [model]) if self.backend else ():
            module.compile(backend=self.backend, mode=self.mode, dynamic=False if self.blocks else None)
        return model

    def upload(self) -> Iterable[Batch]:
        """Return the batches on the device, for a loop that copies them itself."""
        if self.device.type == "cpu":
            return self.batches()
        return ({key: x.to(self.device, non_blocking=True) for key, x in batch.items()} for batch in self.batches())


def train(
    job: Job, model: nn.Module, optimizer: Optimizer, backward: Callable[[Tensor], object] = Tensor.backward,
    log: Callable[[float, int], object] | None = None,
) -> None:  # fmt: skip
    losses, amp = [], job.precision == "bf16"
    for step, batch in enumerate(job.upload(), start=1):
        with torch.autocast(job.device.type, torch.bfloat16) if amp else nullcontext():
            loss = job.recipe.loss(model, batch)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            losses.append(loss.item())
            if log:
                log(losses[-1], step)
        job.tick()


def bare(job: Job, wrap: Callable[[nn.Module], nn.Module] | None = None) -> None:
    """Train in plain PyTorch; `wrap` may be DDP, in the process group that exists."""
    model, optimizer = job.build()
    train(job, (wrap or job.compiled)(model), optimizer)


def bare_in_one_group(job: Job) -> None:
    train(job, *job.build(lambda model: [{"params": list(model.parameters())}]))


def echelon(
    job: Job, callbacks: Mapping[str, Callback] | None = None, place: Place = ALONE,
    checkpoint: CheckpointOptions | None = None,
) -> None:  # fmt: skip
    never = CheckpointOptions(str(job.folder / "ckpt"), every_steps=None, every_minutes=None)
    options: Any = {"precision": job.precision, "accelerator": job.device.type, "checkpoint": checkpoint or never}
    fit(Trainer(
        job.recipe, callbacks, job.optimizer, batch=job.batch * place.world, place=place,
        options=Options(
            max_steps=job.steps, log_every_steps=LOG_EVERY, run_dir=str(job.folder / "run"), timeout_s=60, **options
        ),
        data=DataOptions(workers=job.workers),
    ))  # fmt: skip


def observers() -> dict[str, Callback]:
    """Return the default observers that need no package and no second thread."""
    return {"progress": Progress(), "metrics_file": MetricsFile(), "throughput": Throughput(), "memory": Memory()}


def fabric(job: Job) -> None:
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]
    from lightning.fabric.loggers import CSVLogger  # pyright: ignore[reportMissingImports]

    fabric = Fabric(accelerator=job.device.type, devices=1, loggers=CSVLogger(job.folder))
    model, optimizer = fabric.setup(*job.build())
    train(job, model, optimizer, fabric.backward, lambda loss, step: fabric.log("train/loss", loss, step))


def ignite(job: Job) -> None:
    from ignite.engine import Engine, Events  # pyright: ignore[reportMissingImports]

    model, optimizer = job.build()
    losses = []

    def update(engine: Engine, batch: Batch) -> Tensor:
        loss = job.recipe.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    engine = Engine(update)
    log = Events.ITERATION_COMPLETED(every=LOG_EVERY)
    engine.add_event_handler(log, lambda engine: losses.append(engine.state.output.item()))
    engine.run(job.upload(), max_epochs=1, epoch_length=job.steps)


def accelerate(job: Job) -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=job.device.type == "cpu")
    model, optimizer = accelerator.prepare(*job.build())
    train(job, model, optimizer, accelerator.backward)


class WithLoss(nn.Module):
    """The model with its loss, as Hugging Face's trainer wants it."""

    accepts_loss_kwargs = False

    def __init__(self, net: nn.Module, recipe: Any) -> None:
        super().__init__()
        self.net, self.recipe = net, recipe

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.recipe.loss(self.net, batch)}


def hugging_face(job: Job) -> None:
    import transformers

    class Ticking(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            job.tick()

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return job.batches()

    net, optimizer = job.build()
    whole = bool(job.backend) and not job.blocks
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    arguments = transformers.TrainingArguments(
        str(job.folder), max_steps=job.steps, logging_steps=LOG_EVERY, max_grad_norm=0.0,
        use_cpu=job.device.type == "cpu", bf16=job.precision == "bf16", save_strategy="no", report_to="none",
        disable_tqdm=True, torch_compile=whole, torch_compile_backend=job.backend if whole else None,
    )  # fmt: skip
    model = WithLoss(job.compiled(net) if job.blocks else net, job.recipe)
    Trainer(model, arguments, optimizers=(optimizer, constant), callbacks=[Ticking()]).train()


def lightning(job: Job) -> None:
    import lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.loggers import CSVLogger  # pyright: ignore[reportMissingImports]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            net, self.optimizer = job.build()
            self.net = job.compiled(net)

        def training_step(self, batch: Batch, _: int) -> Tensor:
            loss = job.recipe.loss(self.net, batch)
            self.log("train/loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            job.tick()

        def configure_optimizers(self) -> Optimizer:
            return self.optimizer

    lightning.Trainer(
        accelerator=job.device.type, devices=1, max_steps=job.steps, log_every_n_steps=LOG_EVERY,
        precision="bf16-mixed" if job.precision == "bf16" else "32-true", logger=CSVLogger(job.folder),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), job.batches())  # fmt: skip
