"""Attributes of a LightningModule, its data and its trainer, whose values are compared with Lightning's one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning import by_lightning, make_echelon, same_weights
from support.needs import needs
from torch.utils.data import TensorDataset

from trainer.trainer import Trainer

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("tmp_path")]
KEYS = ("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE", "name")


def both(kind: Any, data: Any, **lightnings: Any) -> tuple[Trainer, Any]:
    """Train one epoch of 12 steps by both trainers."""
    ours = make_echelon(kind, data(), max_epochs=1, validate_every=None)
    ours.fit()
    return ours, by_lightning(kind, data(), max_epochs=1, log_every_n_steps=1, **lightnings)


def test_folders_callbacks_and_logged_numbers():
    """In each batch. The folder is that of the run, which Lightning is given."""
    import lightning_modules

    found: list[dict[str, Any]] = []

    def note(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer = self.trainer
        found.append({name: str(Path(getattr(trainer, name)).resolve()) for name in ("default_root_dir", "log_dir")})
        found[-1] |= {"callbacks": trainer.callbacks, "loss": trainer.logged_metrics["train_loss"].item()}

    kind = type("Own", (lightning_modules.AutoEncoder,), {"on_train_batch_end": note})
    both(kind, lightning_modules.Numbers, default_root_dir="runs/r")
    ours, theirs = found[:12], found[12:]
    assert ours == [each | {"loss": pytest.approx(each["loss"])} for each in theirs] and len(theirs) == 12


def test_a_frozen_part_does_not_train():
    """`freeze` and `unfreeze` of a LightningModule inside of the one that trains, before the first step."""
    import lightning_modules

    class Own(lightning_modules.AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.inner = lightning_modules.AutoEncoder()
            self.other = lightning_modules.AutoEncoder()

        def setup(self, stage: str) -> None:
            self.inner.freeze()
            self.other.freeze()
            self.other.unfreeze()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].flatten(1)
            parts = (self, self.inner, self.other)
            return sum((part.decoder(part.encoder(x)) - x).square().mean() for part in parts)

    ours, theirs = both(Own, lightning_modules.Numbers)
    module = theirs.lightning_module
    assert same_weights(ours.module, module)
    assert [p.requires_grad for p in ours.module.parameters()] == [p.requires_grad for p in module.parameters()]
    assert not any(p.requires_grad for p in ours.module.inner.parameters())


def test_hyperparameters_and_names_of_the_data():
    import lightning_modules

    class Data(lightning_modules.Numbers):
        def __init__(self, samples: int = 48, name: str = "a") -> None:
            super().__init__(samples)
            self.save_hyperparameters()

    kind = type("Own", (lightning_modules.AutoEncoder,), {"found": []})

    def note(self: Any) -> None:
        data = self.trainer.datamodule
        self.found.append([dict(data.hparams), dict(data.hparams_initial), *(getattr(data, key) for key in KEYS)])

    kind.on_train_start = note
    both(kind, Data)
    ours, theirs = kind.found
    assert ours == theirs and theirs[0] == {"samples": 48, "name": "a"}


def test_data_from_datasets():
    """Its loaders' batches, which shuffle with torch's seed: the sets of samples are compared."""
    import lightning as L
    import lightning_modules

    rows = torch.arange(24.0).view(-1, 1)

    def data() -> Any:
        return L.LightningDataModule.from_datasets(TensorDataset(rows[:16]), TensorDataset(rows[16:]), batch_size=4)

    ours, theirs = both(lightning_modules.Seen, data)
    seen = [sorted(i for batch in each.seen for i in batch) for each in (ours.module, theirs.lightning_module)]
    assert seen == [list(range(16))] * 2 and len(ours.module.seen) == len(theirs.lightning_module.seen) == 4
    own = float(theirs.callback_metrics["val_seen"])
    assert ours.evaluate()["val/seen"] == own == 19.5
