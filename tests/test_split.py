"""Split-invariant: the gradient of a step depends on its samples alone, not on how they were split."""

import numpy as np
import pytest
from ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.launch import Place
from trainer.options import DataOptions, Options
from trainer.trainer import Trainer


class Record(Callback):
    def __init__(self) -> None:
        self.gradients: list[np.ndarray] = []
        self.refs: list[tuple[int, ...]] = []

    def on_before_optimizer_step(self, trainer) -> None:
        self.gradients.append(np.concatenate([p.grad.flatten().numpy().copy() for p in trainer.parameters]))
        self.refs.append([tuple(ref) for ref in trainer.data.refs])
        self.weight = trainer.weight


def gradients(place: Place, accumulate: int) -> tuple[list[np.ndarray], list[list[tuple[int, ...]]], int]:
    record = Record()
    trainer = Trainer(
        Toy(dtype="float64"),  # 1 to 4 outputs count in a sample, so ranks' weights differ
        {"record": record},
        batch=12,
        accumulate=accumulate,
        options=Options(max_steps=3),
        data=DataOptions(workers=0, lanes=5, block=4),
        place=place,
    )
    trainer.fit()
    return record.gradients, record.refs, record.weight


@pytest.mark.parametrize(("world", "accumulate"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_gradients_do_not_depend_on_the_split(world, accumulate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, samples, weight = run_ranks(1, gradients, 1)[0]
    split = run_ranks(world, gradients, accumulate)
    for step in range(3):
        union = sorted(ref for _, refs, _ in split for ref in refs[step])
        assert union == sorted(samples[step])
        for rank_gradients, _, rank_weight in split:
            np.testing.assert_allclose(rank_gradients[step], whole[step], rtol=1e-10, atol=1e-14)
            assert rank_weight == weight
