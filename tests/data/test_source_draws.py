"""Random numbers of samples: those of seeding each one, although samples that draw nothing are not seeded."""

import itertools
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import ACCUMULATE, BATCH, SEED, small_loader, steps
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


class Collating(Given):
    """`collate` draws: with each sample's seed, the numbers are those that follow the last sample's."""

    def collate(self, samples: list[Tensor]) -> Tensor:
        noise = random.random() + np.random.random() + float(torch.rand(()))
        return torch.cat([torch.stack(samples), torch.full((len(samples), 1), noise, dtype=torch.float64)], dim=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("draw", ["none", "all"])
def test_a_collate_that_draws_has_the_numbers_after_its_last_sample(draw, workers):
    dataset = Drawing(draw, 0)
    for step in steps(small_loader(Collating(dataset), 0, 1, workers=workers), 0, 5):
        micro = BATCH // ACCUMULATE
        for batch, last in zip(step.batches, step.refs[micro - 1 :: micro], strict=True):
            by_hand_seeded(dataset, [last])
            assert set(batch[:, 2].tolist()) == {random.random() + np.random.random() + float(torch.rand(()))}


@pytest.mark.parametrize("draw", ["random", "all"])
def test_a_validation_sample_that_draws_is_seeded_too(draw):
    loader = small_loader(Given(Drawing(draw, 0)), 0, 1, workers=0)
    found = torch.cat([batch.batch for batch in loader.validate()])
    loader.close()
    expected = by_hand_seeded(Drawing(draw, 0), [Ref(0, int(i), 0) for i in found[:, 0].tolist()])
    assert found.tolist() == expected and len(expected) == SAMPLES


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


class Ended(Drawing):
    def __getitem__(self, i: int) -> Tensor:
        return next(iter([])) if i == 7 else super().__getitem__(i)


def test_a_sample_whose_code_raises_stop_iteration_is_named():
    """It would end the list of samples, so that a batch were shorter."""
    with pytest.raises(RuntimeError, match=r"^sample 7: RuntimeError: StopIteration"):
        steps(small_loader(Given(Ended("none", 0)), 0, 1, workers=0), 0, 5)


class InPlace(Drawing):
    """Samples are views of one tensor, and the transform changes them."""

    def __init__(self) -> None:
        super().__init__("none", 0)
        self.kept = torch.arange(SAMPLES, dtype=torch.float64).repeat(2, 1).t().contiguous()

    def __getitem__(self, i: int) -> Tensor:
        return self.kept[i].clone()


class Changing(Given):
    calls = 0

    def transform(self, sample: Tensor, rng: Any) -> Tensor:
        self.calls += 1
        return sample.add_(100)


def test_the_second_reading_of_a_sample_does_not_change_the_first():
    recipe = Changing(InPlace())
    for step in steps(small_loader(recipe, 0, 1, workers=0), 0, 2):
        assert torch.cat(step.batches)[:, 1].tolist() == [ref.shard + 100 for ref in step.refs]
    assert recipe.calls == 2 * BATCH + 1


def fails(dataset: Drawing, items: list[int]) -> list[Tensor]:
    if len(items) > 1:
        raise OSError("the server is busy")
    return [dataset[i] for i in items]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (fails, "OSError: the server is busy"),
        (lambda dataset, items: [dataset[i] for i in items[-5:]], "ValueError: returned 5 samples for 6 indices"),
        (lambda dataset, items: {"x": items}, "TypeError: returned a dict; return a list of samples"),
    ],
)
def test_getitems_that_fails_where_each_sample_can_be_read_is_left_with_a_warning(values, reason, caplog):
    dataset = BrokenAtOnce(values)
    with caplog.at_level(logging.WARNING, "echelon"):
        found = steps(small_loader(Given(dataset), 0, 1, workers=0), 0, 3)
    assert [row for step in found for row in torch.cat(step.batches)[:, 0].tolist()] == [
        ref.shard for step in found for ref in step.refs
    ]
    said = "recipe.data: BrokenAtOnce.__getitems__ fails where each sample can be read"
    assert [line.message for line in caplog.records] == [f"{said} ({reason}); it is not used any more"]


class Marked(DrawingAtOnce):
    calls = 0

    def __getitems__(self, items: list[int]) -> list[Tensor]:
        self.calls += 1
        return super().__getitems__(items)


def test_a_micro_batch_is_one_call_of_getitems():
    dataset = Marked("none", 0)
    found = steps(small_loader(Given(dataset), 0, 1, workers=0), 0, 3)
    assert dataset.calls == 3 * ACCUMULATE - 1  # the samples of the first are read one by one
    assert [row for step in found for row in torch.cat(step.batches)[:, 0].tolist()] == [
        ref.shard for step in found for ref in step.refs
    ]
