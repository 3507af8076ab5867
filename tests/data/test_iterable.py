"""An iterable of batches: walked again and again, replayed to the bit, its randomness apart from the training's."""

import contextlib
import io
import itertools
import logging
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import KeepBatches, open_loader, whole
from support.messages import refuses
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from toy_recipe import Toy

from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.batch import Split, count_samples
from trainer.data.iterable import Iterated, digest, hint_at_samples, replay
from trainer.data.loader import Loader
from trainer.data.torch_loader import part_of
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
def test_it_is_replayed_to_the_bit(data, tmp_path):
    straight, weights = train(data, "straight", 6)
    if data is not Drawn:
        assert [int(x[0, 0]) for x in straight] == [*range(7), *range(5)]
    first, _ = train(data, "resumed", 4)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # another process would know nothing of the first
    rest, resumed = train(data, "resumed", 6, "auto")
    assert same(first + rest, straight)
    assert len({float(x[0, 0]) for x in straight}) == (12 if data is Drawn else 7)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_its_draws_are_none_of_the_trainings(tmp_path):
    """Dropout falls as it does on the same batches from a list, which draws nothing."""
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
    with refuses("recipe.data('train')", "generator", kind=DataError):
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
        "accumulate=2); yield batches of 6, or give micro_batch=5, accumulate=2 and batch=20. For a list of samples, "
        "return a Dataset"
    )


def test_a_collate_fn_may_leave_samples_out():
    whole = [torch.ones(2) * i for i in range(12)]
    loader = DataLoader(whole, 6, collate_fn=lambda samples: torch.stack([x for x in samples if x[0] > 2]))  # pyright: ignore[reportArgumentType] a list is a data set
    recipe = Counted()
    recipe.data = lambda split: loader if split == "train" else None
    step = next(open_loader(recipe, options=DataOptions(), batch=6).train(0))
    assert step.weights == [3]


class Of(IterableDataset):
    """Yields one sample after the other, and lacks yields_samples."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.sample)


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"x": torch.zeros(8)}, "a batch has 8 samples, and this run's micro-batch is 6"),
        ({"x": torch.tensor(1.0)}, "a batch begins with a tensor of shape ()"),
        ({"x": 1}, "a batch begins with a value of type int"),
    ],
)
def test_an_iterable_of_samples_is_told_of_its_attribute(sample, told):
    recipe = Counted()
    recipe.data = lambda split: Of(sample) if split == "train" else None
    with pytest.raises(DataError) as caught:
        next(make_loader(recipe, 0).train(0))
    assert told in str(caught.value)
    assert str(caught.value).endswith(". If the iterable yields samples, give it the attribute yields_samples = True")


class Wraps(Of):
    source = "a file"


class Batched(Of):
    yields_samples = False


@pytest.mark.parametrize(("kind", "told"), [(Wraps, True), (Batched, False)])
@pytest.mark.parametrize("limit", [False, True])
def test_an_iterable_is_known_by_its_own_attribute(kind, told, limit):
    source = kind(0)
    assert bool(hint_at_samples(Iterated(source, 2 if limit else None).given)) == told


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


class Marked(Dataset):
    """Samples that are their own numbers, as a batch of `make_batch` has them."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), float(i)), "y": torch.zeros(4), "mask": torch.ones(4)}


def numbers_of(loader: Loader, split: str, steps: int = 0) -> list[int]:
    """The samples of the first steps, or of a validation."""
    if split == "train":
        batches = [batch for step in itertools.islice(loader.train(0), steps) for batch in whole(step).batches]
    else:
        batches = [micro.batch for micro in loader.validate()]
    return [int(row[0]) for batch in batches for row in batch["x"]]


def of_ranks(make: Any, split: str = "train", steps: int = 0, world: int = 2, seed: int = 7) -> list[list[int]]:
    recipe = [Given(make, make()) for _ in range(world)]
    return [numbers_of(make_loader(recipe[rank], rank, seed, world), split, steps) for rank in range(world)]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "generator": torch.Generator()}])
@pytest.mark.parametrize("split", ["train", "val"])
def test_ranks_share_a_data_loaders_samples(options, split):
    """Each sample of an epoch goes to one rank."""

    def make() -> DataLoader[Any]:
        generator = {"generator": torch.Generator().manual_seed(3)} if "generator" in options else {}
        return DataLoader(Marked(48), batch_size=6, **(options | generator))

    ranks = of_ranks(make, split, steps=2)  # an epoch: 2 ranks x 2 steps x 2 micro-batches of 6
    assert [len(set(own)) for own in ranks] == [24, 24] and set(ranks[0]) | set(ranks[1]) == set(range(48))
    if not options:
        assert ranks == [[*range(0, 48, 2)], [*range(1, 48, 2)]]
    else:
        assert sorted(ranks[0]) != [*range(0, 48, 2)]
    assert ranks == of_ranks(make, split, steps=2)
    alone = numbers_of(make_loader(Given(make, make()), 0, world=1), split, steps=4)
    assert sorted(alone) == [*range(48)]


def test_epochs_and_seeds_shuffle_a_data_loader_differently():
    def make() -> DataLoader[Any]:
        return DataLoader(Marked(48), batch_size=6, shuffle=True)

    two = of_ranks(make, steps=4)
    assert all(own[:24] != own[24:] for own in two) and two != of_ranks(make, steps=4, seed=8)
    assert {*two[0][24:], *two[1][24:]} == set(range(48))


class Ends(IterableDataset):
    def __init__(self, samples: Iterator[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return self.samples


class NoLength(Dataset[Any]):
    """A weighted sampler needs no length of the data."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


def test_ranks_share_the_samples_of_other_samplers_of_torchs():
    def some() -> DataLoader[Any]:
        return DataLoader(Marked(), batch_size=6, sampler=SubsetRandomSampler(range(24)))

    def weighed() -> DataLoader[Any]:
        rows = Marked()
        return DataLoader(NoLength(rows), batch_size=6, sampler=WeightedRandomSampler([1.0] * 20, 48))

    def batches() -> DataLoader[Any]:
        return DataLoader([make_batch(torch.full((6, 8), float(i))) for i in range(8)], batch_size=None)

    assert sorted(chain(*of_ranks(some, steps=1))) == [*range(24)]
    assert max(chain(*of_ranks(weighed, steps=2))) < 20
    assert {*of_ranks(batches, steps=2)[0]} == {0, 2, 4, 6}


class OfRank(Sampler[list[int]]):
    """Batches of a rank, by a recipe that knows of ranks."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([*range(start, start + 6)] for start in range(0, 36, 6))


class Few(list[Any]):
    yields_samples = True


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: Few([make_batch(torch.ones(8))] * 11), "stream has fewer samples on this rank than micro_batch=6;"),
        (
            lambda: DataLoader(Marked(11), 6, drop_last=True),
            "DataLoader with drop_last=True has fewer samples on this rank than batch_size=6; give",
        ),
        (
            lambda: DataLoader(Marked(5), batch_sampler=BatchSampler(SequentialSampler(Marked(5)), 6, True)),
            "DataLoader with drop_last=True has fewer samples on this rank than batch_size=6; give",
        ),
        (lambda: DataLoader(Marked(1), 6), "DataLoader has no sample on this rank; give more samples"),
    ],
)
def test_too_few_samples_for_a_batch_are_told_by_their_source(data, said):
    """On the last of two ranks, which has 5 of 11 samples. Only the 5 of a BatchSampler are not split."""
    loader = make_loader(Given(data), 1)
    with pytest.raises(DataError, match=rf"^recipe\.data\('train'\): a pass of the {said}"):
        next(loader.train(0))
    source: Any = loader.source
    with pytest.raises(DataError, match=f"a pass of the {said}"):
        list(replay(loader._own(source.given, True), len, 0, True, Iterated(source.given, 3)))


def test_a_data_loader_that_ends_for_good_is_no_small_one():
    once = DataLoader(Ends(make_batch(torch.ones(8)) for _ in range(6)), 6, drop_last=True)
    with refuses("recipe.data('train')", "generator", kind=DataError):
        list(make_loader(Given(lambda: once), 0, world=1).train(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Marked(), batch_sampler=OfRank()),
        lambda: DataLoader(Marked(), 6, sampler=DistributedSampler(Marked(), 3, 1, shuffle=False)),
    ],
)
def test_samplers_of_ones_own_are_left_alone(make):
    ranks = of_ranks(make, steps=1)
    assert ranks[0] == ranks[1]


def test_the_rank_of_a_data_loader_leaves_training_its_random_numbers():
    loader = DataLoader(Marked(), 6, shuffle=True)
    state = torch.get_rng_state()
    part: Any = part_of(loader, 0, 2, 5, print)
    assert len(list(part.sampler)) == len(part.sampler) == 20 and torch.equal(torch.get_rng_state(), state)
    assert len(loader.sampler) == 40


def test_the_shares_of_a_data_loader_are_told_once(caplog):
    caplog.set_level(logging.INFO, "echelon")
    loader = Loader(Iterated([]), None, Split(12, 2), DataOptions(), validation=Iterated(DataLoader(Marked(), 6)))
    walks = [list(loader.validate()) for _ in range(3)]
    assert [len(micros) for micros in walks] == [4, 4, 4]
    assert caplog.messages == ["recipe.data: 2 ranks share the 40 samples of a DataLoader"]


def shares(place: Place, make: Any) -> tuple[float, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        options = Options(max_steps=4, log_every_steps=1, validate_every=None)
        recipe = Given(make)
        recipe.dropout = 0.0
        trainer = Trainer(recipe, batch=24, accumulate=2 // place.world, options=options, place=place)
        trainer.fit()
    return trainer.last_metrics["train/loss"], output.getvalue()


def listed() -> list[Any]:
    return [{"x": torch.full((12, 8), 0.1 * i), "y": torch.zeros(12, 4), "mask": torch.ones(12, 4)} for i in range(4)]


def loaded() -> DataLoader[Any]:
    return DataLoader(Marked(96), batch_size=12)


def test_two_ranks_train_on_a_data_loader_as_one_does(tmp_path):
    """A step of two micro-batches of 12 on one rank has the samples of one of 12 on each of two ranks."""
    ((alone, _),) = run_ranks(1, shares, loaded)
    (first, said), (second, _) = run_ranks(2, shares, loaded)
    assert first == second == pytest.approx(alone, rel=1e-5) and "the same first batch" not in said


def test_ranks_that_repeat_each_others_batches_are_told(tmp_path):
    (_, said), _ = run_ranks(2, shares, listed)
    assert "warning: recipe.data('train'): ranks have the same first batch, so they repeat each other's work" in said
    ((_, alone),) = run_ranks(1, shares, listed)
    assert "first batch" not in alone


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((torch.ones(3), "a"), (torch.ones(3), "a"), True),
        (torch.ones(3), torch.ones(3, dtype=torch.int32), False),
        ({"a": torch.ones(3)}, {"b": torch.ones(3)}, False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.zeros(0), torch.zeros(0, dtype=torch.bfloat16), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (object(), object(), False),
    ],
)
def test_batches_are_told_apart_by_their_values(one, other, same):
    assert (digest(one) == digest(other)) == same


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
