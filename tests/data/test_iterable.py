"""An iterable of batches: walked again and again, replayed to the bit, its randomness apart from the training's."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import KeepBatches, open_loader, whole
from torch import Tensor
from toy_recipe import Toy

from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.batch import count_samples
from trainer.data.loader import Loader
from trainer.errors import DataError
from trainer.log import log_to_terminal, stop_log
from trainer.process.environment import Place
from trainer.trainer import Trainer

BATCH, ACCUMULATE = 12, 2


def make_batch(x: Tensor) -> dict[str, Tensor]:
    return {"x": x, "y": torch.zeros(6, 4), "mask": torch.ones(6, 4)}


class Drawn:
    """5 batches, drawn from every generator there is, one draw for all of them."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        scale = random.random() + np.random.random()
        return (make_batch(scale * torch.rand(6, 8) + random.random() + np.random.random()) for _ in range(5))


def numbered() -> list[dict[str, Tensor]]:
    return [make_batch(torch.full((6, 8), float(i))) for i in range(7)]


def endless() -> Iterator[Any]:
    return itertools.cycle(numbered())


class Given(Toy):
    def __init__(self, train: Any, val: Any = None) -> None:
        super().__init__(dropout=0.5)
        self.train, self.val = train, val

    def data(self, split: str) -> Any:
        return self.train() if split == "train" else self.val

    def weight(self, batch: Any) -> int:
        return count_samples(batch)


class Seen(KeepBatches):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_step_end(self, trainer) -> None:
        self.seen += [batch["x"] for batch in self.batches]


def train(data: Any, run: str, stop: int, resume: str | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    seen = Seen()
    options = Options(
        max_steps=stop, run_dir=f"runs/{run}", resume=resume, checkpoint=CheckpointOptions(every_steps=None),
        validate_every=3,
    )  # fmt: skip
    recipe = Given(data, Drawn())  # validation draws too, and a replay does not repeat it
    trainer = Trainer(recipe, {"seen": seen}, batch=BATCH, accumulate=ACCUMULATE, options=options, place=Place())
    trainer.fit()
    return seen.seen, trainer.module.state_dict()


def make_loader(recipe: Any, rank: int, seed: int = 7, world: int = 2) -> Loader:
    return open_loader(
        recipe, rank, world, options=DataOptions(), batch=world * BATCH, accumulate=ACCUMULATE, seed=seed
    )


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("data", [numbered, endless, Drawn], ids=["list", "generator", "random"])
def test_it_is_replayed_to_the_bit(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    straight, weights = train(data, "straight", 6)
    if data is not Drawn:
        assert [int(x[0, 0]) for x in straight] == [*range(7), *range(5)]
    first, _ = train(data, "resumed", 4)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # another process would know nothing of the first
    rest, resumed = train(data, "resumed", 6, "auto")
    assert same(first + rest, straight)
    assert len({float(x[0, 0]) for x in straight}) == (12 if data is Drawn else 7)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_its_draws_are_none_of_the_trainings(tmp_path, monkeypatch):
    """Dropout falls as it does on the same batches from a list, which draws nothing."""
    monkeypatch.chdir(tmp_path)
    batches, weights = train(Drawn, "drawn", 4)
    _, again = train(lambda: list(map(make_batch, batches)), "listed", 4)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_ranks_and_seeds_draw_differently():
    drawn = []
    for rank, seed in ((0, 7), (1, 7), (0, 8)):
        loader = make_loader(Given(Drawn), rank, seed)
        drawn += [whole(step).batches[0] for step in itertools.islice(loader.train(0), 3)]
    assert len({float(batch["x"][0, 0]) for batch in drawn}) == 9


def test_every_validation_draws_the_same():
    loader = make_loader(Given(numbered, Drawn()), 0)
    once, again = ([micro.batch["x"] for micro in loader.validate()] for _ in range(2))
    assert len(once) == 5 and same(once, again)


def test_one_that_ends_for_good_is_refused():
    loader = make_loader(Given(lambda: iter(numbered())), 0)
    with pytest.raises(
        DataError, match=r"recipe\.data\('train'\): the iterable gave no batch; a generator must not end"
    ):
        list(itertools.islice(loader.train(0), 4))


class Counted:
    """A recipe without `weight`, so that samples are counted."""

    def model(self) -> None: ...

    def loss(self, model: Any, batch: Any) -> None: ...

    def data(self, split: str) -> Any:
        return [make_batch(torch.zeros(5, 8))] if split == "train" else None


def test_batches_of_another_size_are_refused_at_the_first():
    """Else the samples and all rates would be wrong."""
    loader = make_loader(Counted(), 0)
    with pytest.raises(DataError) as caught:
        next(loader.train(0))
    assert str(caught.value) == (
        "recipe.data('train'): a batch has 5 samples, and this run's micro-batch is 6 (batch=24, 2 rank(s), "
        "accumulate=2); yield batches of 6, or give micro_batch=5, accumulate=2 and batch=20"
    )


def test_a_recipe_that_weighs_its_batches_may_give_any_size():
    loader = make_loader(Given(lambda: [make_batch(torch.zeros(5, 8))]), 0)
    assert next(loader.train(0)).weights == [5, 5]


@pytest.mark.parametrize("batch", [{"text": "a"}, {"scale": torch.tensor(2.0)}])
def test_batches_whose_samples_no_tensor_counts_are_taken_as_they_are(batch):
    recipe = Given(lambda: [batch])
    recipe.weight = lambda _: 6
    loader = make_loader(recipe, 0)
    assert whole(next(loader.train(0))).batches == [batch, batch]


@pytest.mark.parametrize(("world", "times"), [(1, 0), (2, 1)])
def test_ranks_are_told_that_each_walks_its_own(world, times, capsys):
    log_to_terminal(0)
    loader = make_loader(Given(numbered), 0, world=world)
    list(itertools.islice(loader.train(0), 3))
    stop_log()
    line = f"recipe.data('train') is an iterable: each of {world} ranks has batches of its own"
    assert capsys.readouterr().out.count(line) == times


def test_close_ends_it():
    ended = []

    def batches() -> Iterator[Any]:
        try:
            yield from endless()
        finally:
            ended.append(True)

    class Walked:
        def __iter__(self) -> Iterator[Any]:
            return batches()

    loader = make_loader(Given(Walked), 0)
    stream = loader.train(0)
    next(stream)
    assert not ended
    loader.close()
    assert ended
