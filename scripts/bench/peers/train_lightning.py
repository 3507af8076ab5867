"""Lightning, with its ModelCheckpoint."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from scripts.bench.peers import task


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = task.model()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.net(**batch)["loss"]
        self.log("train/loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # bench
        task.tick()  # bench

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return task.optimizer(self.net.parameters())


trainer = L.Trainer(
    accelerator=task.DEVICE.type,
    devices=task.WORLD,
    max_steps=task.STEPS,
    log_every_n_steps=task.LOG_EVERY,
    callbacks=[ModelCheckpoint("ckpt", every_n_train_steps=task.SAVE_AT, save_last=True)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
last = Path("ckpt/last.ckpt")
trainer.fit(Module(), DataLoader(task.Random(), task.BATCH, shuffle=True), ckpt_path=last if last.exists() else None)
