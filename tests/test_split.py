"""Split-invariant: the gradient of a step depends on its samples alone, not on how they were split."""

from typing import Any

import numpy as np
import pytest
from support.ranks import run_ranks
from torch.utils.data import default_collate
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Record(Callback):
    def __init__(self) -> None:
        self.gradients: list[np.ndarray] = []
        self.refs: list[tuple[int, ...]] = []

    def on_before_optimizer_step(self, trainer) -> None:
        self.gradients.append(np.concatenate([p.grad.flatten().numpy().copy() for p in trainer.parameters]))
        self.refs.append([tuple(ref) for ref in trainer.data.refs])
        self.weight = trainer.weight


class Sparse(Toy):
    """In most samples nothing counts: many a micro-batch has weight 0, and the mean over it is NaN."""

    def collate(self, samples):
        batch = default_collate(samples)
        batch["mask"] *= batch["x"][:, :1] < 0.1
        return batch


def gradients(place: Place, accumulate: int, recipe: type[Toy]) -> tuple[list[np.ndarray], list[Any], int]:
    record = Record()
    trainer = Trainer(
        recipe(dtype="float64"),  # 1 to 4 outputs count in a sample, so ranks' weights differ
        {"record": record},
        batch=12,
        accumulate=accumulate,
        options=Options(max_steps=3, log_every_steps=1, nodes="1:8"),  # so that parts may differ by a sample
        data=DataOptions(workers=0, lanes=5, block=4),
        place=place,
    )
    trainer.fit()
    assert np.isfinite(trainer.last_metrics["train/loss"])
    return record.gradients, record.refs, record.weight


@pytest.mark.parametrize("recipe", [Toy, Sparse])
@pytest.mark.parametrize(("world", "accumulate"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (5, 2)])
def test_gradients_do_not_depend_on_the_split(world, accumulate, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, samples, weight = run_ranks(1, gradients, 1, recipe)[0]
    split = run_ranks(world, gradients, accumulate, recipe)
    for step in range(3):
        union = sorted(ref for _, refs, _ in split for ref in refs[step])
        assert union == sorted(samples[step])
        for rank_gradients, _, rank_weight in split:
            np.testing.assert_allclose(rank_gradients[step], whole[step], rtol=1e-10, atol=1e-14)
            assert rank_weight == weight
