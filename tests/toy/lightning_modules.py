"""LightningModules after those of Lightning's documentation, on data of numbers."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(L.LightningModule):
    """After "Lightning in 15 minutes": modules as arguments, Adam without a scheduler, one `self.log`."""

    def __init__(self, inputs: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        x = x.view(x.size(0), -1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Classifier(L.LightningModule):
    """After the documentation of `configure_optimizers`: parameter groups, a scheduler of steps and one of epochs,
    a metric of torchmetrics, and hooks, which note their calls."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh())
        self.head = nn.Linear(16, classes)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=classes)
        self.calls: list[str] = []
        self.rates: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log_dict({"train_loss": loss, "train_mean": logits.mean()})
        return {"loss": loss, "predicted": logits.argmax(1)}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, *rest = batch
        return [2 * x, *rest]

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(f"backward {loss.item():.6f}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        self.rates.append(sorted({group["lr"] for group in optimizer.param_groups}))
        self.calls.append(f"start {self.current_epoch} {self.global_step} {batch_idx} {batch[0].mean().item():.5f}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        sums = outputs["predicted"].sum().item(), batch[0].sum().item()
        self.calls.append("end {} {:.6f} {} {:.4f}".format(batch_idx, outputs["loss"].item(), *sums))

    def on_train_epoch_start(self) -> None:
        self.calls.append("epoch start")

    def on_train_epoch_end(self) -> None:
        self.calls.append("epoch end")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append(f"gradients {self.head.weight.grad.norm().item():.5f}")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("val_acc", self.accuracy, prog_bar=True)
        self.log("val_loss", F.cross_entropy(logits, y))

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.backbone.parameters(), "lr": 0.02}, {"params": self.head.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.95**n, lambda n: 1 / (1 + 0.1 * n)])
        return [optimizer], [{"scheduler": by_step, "interval": "step", "frequency": 2}]


class Cycled(Classifier):
    """OneCycleLR, which moves the momentum, too; the number of steps from the trainer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class OnPlateau(AutoEncoder):
    """Its rate falls at each validation, whatever the loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class Frozen(AutoEncoder):
    """Trains its decoder alone."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.decoder.parameters(), lr=1e-2)


class Deep(AutoEncoder):
    """With repeated blocks, which callbacks shard or recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        hidden = x
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return F.mse_loss(self.decoder(self.encoder(hidden)), x)


class Numbers(L.LightningDataModule):
    """Synthetic: points and the quadrant of their first two numbers."""

    def __init__(self, samples: int = 48, batch_size: int = 4, shuffle: bool = False) -> None:
        super().__init__()
        self.samples, self.batch_size, self.shuffle = samples, batch_size, shuffle

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.samples + 13, 3, 4, generator=generator)
        y = (x[:, 0, 0] > 0).long() + 2 * (x[:, 0, 1] > 0).long()
        self.train, self.val = TensorDataset(x[:-13], y[:-13]), TensorDataset(x[-13:], y[-13:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Manual(AutoEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(AutoEncoder):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.encoder, self.decoder)]


class OnTraining(OnPlateau):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() | {"monitor": "train_loss"}


class SameNames(AutoEncoder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("acc", 0.5)
        self.log("train_acc", 1.0)
        return super().training_step(batch, batch_idx)


class MeanOfEpoch(AutoEncoder):
    """Logs with on_epoch by keyword and by place, in a step and at the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_acc", x.sum(), on_step=False, on_epoch=True)
        self.log("size", x.square().sum(), False, None, True, True)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("train_epochs", 1.0, on_epoch=True)


class ReadsMetrics(AutoEncoder):
    """Reads numbers at the end of each batch, by `read`."""

    read: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.read(self.trainer.callback_metrics)


class OwnBackward(AutoEncoder):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class EpochEnd(Classifier):
    """Logs a number and a metric at the end of an epoch of training."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.trained.update(self(batch[0]), batch[1])
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("train_acc_epoch", self.trained)
        self.log("train_batches", float(self.batches))


class AtTheEnd(Classifier):
    """Logs at the end of a validation: a metric alone, a mean of what it has kept, and a collection's numbers."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__(classes)
        self.recall = torchmetrics.Recall("multiclass", num_classes=classes, average="macro")
        self.pair = torchmetrics.MetricCollection(
            [
                torchmetrics.Precision("multiclass", num_classes=classes),
                torchmetrics.F1Score("multiclass", num_classes=4),
            ],
            prefix="val_",
        )
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.recall.update(logits, y)
        self.pair.update(logits, y)
        self.kept.append(logits[:, 0])

    def on_validation_epoch_end(self) -> None:
        self.log("val_recall", self.recall)
        self.log_dict(self.pair)
        kept = torch.cat(self.kept) if self.kept else torch.zeros(0)
        self.log("val_samples", float(len(kept)))
        self.kept.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_recall"}


class Blocks(AtTheEnd):
    """With repeated blocks, which callbacks shard."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class WrongMonitor(AtTheEnd):
    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() | {"monitor": "val_recal"}


class Silent(AutoEncoder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log nothing."""


class Predicts(EpochEnd):
    """Its predictions depend on the mode of the module."""

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        assert (self.trainer.predicting, self.trainer.training) == (True, False)
        (x,) = batch
        logits = F.dropout(self(x), 0.5, self.training)
        return {"class": logits.argmax(1), "logits": logits}


class LogsPredictions(Predicts):
    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.log("size", float(len(batch)))
        return super().predict_step(batch, batch_idx)


class HooksPredictions(Predicts):
    def on_predict_model_eval(self) -> None:
        self.eval()


class Unlabelled(Numbers):
    """Has samples to predict from once it is set up for that."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            generator = torch.Generator().manual_seed(3)
            self.unlabelled = TensorDataset(torch.randn(13, 3, 4, generator=generator))

    def predict_dataloader(self) -> Any:
        return DataLoader(self.unlabelled, batch_size=4)


class Seen(L.LightningModule):
    """Keeps the numbers of the samples of each step, and logs the mean of a validation's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].flatten().int().tolist())
        return self.layer(batch[0] / 100).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_seen", batch[0].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loaders(L.LightningDataModule):
    """The loaders that two functions make."""

    def __init__(self, train: Any, val: Any = None) -> None:
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self) -> Any:
        return self.train()

    def val_dataloader(self) -> Any:
        return self.val() if self.val else []


class Changes(AutoEncoder):
    """What user code changes at the start of epochs: which parameters train, a rate, a group, a state."""

    changes: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.encoder.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        type(self).changes(self, self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Inside(Changes):
    """Unfreezes inside a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.encoder.requires_grad_(self.global_step >= 2)
        return super().training_step(batch, batch_idx)


class Scheduled(Changes):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Reads(Cycled):
    """Notes what `read` reads of it and of its trainer, in each step and at the end of each epoch."""

    read: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.found.append(self.read(self))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.found.append(self.read(self))


def noted(name: str) -> Any:
    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.noted.append(name)
        return getattr(super(self.own, self), name)(*args, **kwargs)

    return note


def noting(base: type, hooks: Any) -> Any:
    """Return a class that notes the calls of its hooks in the list `noted`."""
    made: Any = type("Noting", (base,), {name: noted(name) for name in hooks})
    made.own, made.noted = made, []
    return made
