"""Lightning: a ModelCheckpoint that also saves on exceptions, `ckpt_path="last"`, a loader with a state, torchrun."""

import os
from datetime import timedelta

import lightning as L
import synthetic
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = synthetic.network()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return synthetic.loss_of(self.network, batch)

    def on_train_batch_end(self, outputs: object, batch: list[Tensor], _: int) -> None:
        synthetic.after_step(self.global_step, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def on_fit_end(self) -> None:
        synthetic.finish(self.parameters(), self.trainer.optimizers[0])


L.seed_everything(0)
checkpoints = ModelCheckpoint(
    "ckpt", "{step}", every_n_train_steps=synthetic.EVERY, save_top_k=-1, save_last="link", save_on_exception=True
)
trainer = L.Trainer(
    accelerator="cpu",
    devices=synthetic.WORLD,
    strategy=DDPStrategy(timeout=timedelta(seconds=int(os.environ.get("TIMEOUT_S", "1800")))),
    max_steps=synthetic.STEPS,
    use_distributed_sampler=False,
    callbacks=[checkpoints],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
sampler = StatefulDistributedSampler(synthetic.Points(), synthetic.WORLD, synthetic.RANK, shuffle=True)
loader = StatefulDataLoader(synthetic.Points(), synthetic.BATCH // synthetic.WORLD, sampler=sampler)
trainer.fit(Module(), loader, ckpt_path="last")
