"""Random numbers of samples: those of seeding each one, although samples that draw nothing are not seeded."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import ACCUMULATE, SEED, small_loader, steps
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from toy_recipe import Toy

from trainer.data.sampling.order import Ref
from trainer.rng import SAMPLE, mix, seed_all

SAMPLES = 31


class Drawing(Dataset[Tensor]):
    """Samples (number, noise); noise is `draw(i)` from sample `first` on, and 0 before."""

    generators = {
        "random": lambda i: random.random(),
        "NumPy": lambda i: np.random.random(),
        "torch": lambda i: float(torch.rand(())),
        "all": lambda i: random.random() + np.random.random() + float(torch.rand(())),
        "own seed": lambda i: random.Random(torch.initial_seed()).random(),
        "restored": lambda i: forked(),
        "none": float,
    }

    def __init__(self, kind: str, first: int) -> None:
        self.draw, self.first = self.generators[kind], first

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, self.draw(i) if i >= self.first else 0], dtype=torch.float64)


class DrawingAtOnce(Drawing):
    def __getitems__(self, items: list[int]) -> list[Tensor]:
        return [self[i] for i in items]

    def __getitem__(self, i: int) -> Tensor:
        return super().__getitem__(i)


def forked() -> float:
    with torch.random.fork_rng(devices=[]):
        return float(torch.rand(()))


class Given(Toy):
    weight = None  # pyright: ignore[reportAssignmentType] samples are counted

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset

    def data(self, split: str) -> Any:
        return self.dataset


def by_hand_seeded(dataset: Drawing, refs: list[Ref]) -> list[list[float]]:
    """Samples, each read after seeding all generators from (seed, epoch, sample)."""
    found = []
    for ref in refs:
        seed_all(mix(SEED, SAMPLE, ref.epoch, ref.shard))
        found.append(dataset[ref.shard].tolist())
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Drawing, DrawingAtOnce])
@pytest.mark.parametrize("first", [0, SAMPLES - 3])
@pytest.mark.parametrize("draw", ["random", "NumPy", "torch", "all", "none"])
def test_each_sample_is_seeded_if_any_draws(draw, first, kind, workers):
    """Also if the first micro-batches draw nothing."""
    dataset = kind(draw, first)
    for step in steps(small_loader(Given(dataset), 0, 1, workers=workers), 0, 6):
        assert torch.cat(step.batches).tolist() == by_hand_seeded(dataset, step.refs)


@pytest.mark.parametrize("draw", ["own seed", "restored"])
def test_code_that_hides_its_draws_is_noticed_by_the_first_sample(draw):
    dataset = Drawing(draw, 0)
    for step in steps(small_loader(Given(dataset), 0, 1, workers=0), 0, 3):
        assert torch.cat(step.batches).tolist() == by_hand_seeded(dataset, step.refs)


@pytest.mark.parametrize(
    ("dataset", "draws"),
    [(Drawing("none", 0), 0), (Drawing("all", 0), 1), (TensorDataset(torch.zeros(SAMPLES, 2)), 0)],
)
def test_a_step_that_draws_has_the_same_numbers_whether_or_not_the_data_do(dataset, draws):
    """Such as LayerDrop's, by `random`, without workers."""
    loader = small_loader(Given(dataset), 0, 1, workers=0)
    for step in itertools.islice(loader.train(0), 3):
        after = random.getstate()
        seed_all(mix(SEED, SAMPLE, step.refs[-1].epoch, step.refs[-1].shard))
        for _ in range(draws):
            random.random()
        assert random.getstate() == after
    loader.close()


class Failing(Drawing):
    """A data set's own code fails at sample 7, after a draw if it draws."""

    def __getitem__(self, i: int) -> Tensor:
        sample = super().__getitem__(i)
        if i == 7:
            raise ValueError(f"noise {float(sample[1])!r}")
        return sample


@pytest.mark.parametrize("draw", ["none", "random"])
def test_an_error_has_the_numbers_of_its_sample(draw):
    seed_all(mix(SEED, SAMPLE, 0, 7))
    noise = random.random() if draw == "random" else 7.0
    with pytest.raises(RuntimeError, match=rf"^sample 7: ValueError: noise {noise!r}\n"):
        steps(small_loader(Given(Failing(draw, 0)), 0, 1, workers=0), 0, 3)


class BrokenAtOnce(DrawingAtOnce):
    def __init__(self, values: Any) -> None:
        super().__init__("none", 0)
        self.values = values

    def __getitems__(self, items: list[int]) -> list[Tensor]:
        return self.values(self, items)


def fails(dataset: Drawing, items: list[int]) -> list[Tensor]:
    if len(items) > 1:
        raise OSError("the server is busy")
    return [dataset[i] for i in items]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (fails, "OSError: the server is busy"),
        (lambda dataset, items: [dataset[i] for i in items[-5:]], "ValueError: returned 5 samples for 6 indices"),
    ],
)
def test_getitems_that_fails_is_named_though_each_sample_can_be_read(values, reason):
    with pytest.raises(RuntimeError, match=rf"^sample \d+: __getitems__ of the samples from this one on: {reason}\n"):
        steps(small_loader(Given(BrokenAtOnce(values)), 0, 1, workers=0), 0, 1)


class Marked(DrawingAtOnce):
    calls = 0

    def __getitems__(self, items: list[int]) -> list[Tensor]:
        self.calls += 1
        return super().__getitems__(items)


def test_a_micro_batch_is_one_call_of_getitems():
    dataset = Marked("none", 0)
    found = steps(small_loader(Given(dataset), 0, 1, workers=0), 0, 3)
    assert dataset.calls == 3 * ACCUMULATE + 1  # and one for the first sample's second seed
    assert [row for step in found for row in torch.cat(step.batches)[:, 0].tolist()] == [
        ref.shard for step in found for ref in step.refs
    ]
