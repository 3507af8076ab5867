"""SyncBatchNorm on two GPUs: the training of one rank that sees the whole batch."""

import numpy as np
import pytest
import torch
from support.gpu import needs_two, on_device
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.config.options import DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [*on_device, needs_two]


class Normed(Toy):
    """The toy, whose hidden values are normalised over the batch."""

    def model(self) -> nn.Module:
        return Norms(super().model())


class Norms(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for name, module in list(inner.named_modules()):
            if isinstance(module, nn.Linear) and module.out_features > 1:
                parent, _, own = name.rpartition(".")
                setattr(inner.get_submodule(parent), own, nn.Sequential(module, nn.BatchNorm1d(module.out_features)))

    def forward(self, *args, **options):
        return self.inner(*args, **options)


def train(place: Place, sync: bool) -> np.ndarray:
    """The weights and the running statistics."""
    options = Options(max_steps=6, run_dir=f"runs/{place.world}{sync}", precision="fp32", sync_batch_norm=sync)
    trainer = Trainer(Normed(), batch=12, options=options, data=DataOptions(workers=0), place=place)
    trainer.fit()
    values = [v.detach().flatten().double().cpu() for v in trainer.module.state_dict().values()]
    return torch.cat(values).numpy()


@pytest.mark.timeout(240)
def test_two_ranks_have_the_statistics_and_weights_of_one():
    alone = train(Place(), False)
    synced, apart = run_ranks(2, train, True, timeout_s=110), run_ranks(2, train, False, timeout_s=110)
    assert np.abs(synced[0] - alone).max() < 1e-4 and (synced[0] == synced[1]).all()
    assert np.abs(apart[0] - alone).max() > 1e-3  # without it, each rank normalises by its own samples
