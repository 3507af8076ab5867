"""A DataLoader as data: what a bare loop over it yields, by each of its arguments; its length; its batch size."""

import inspect
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.loaders import EpochOrder, open_loader, whole
from support.messages import refuses
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from trainer.callback import Callback
from trainer.config.options import DataOptions, LimitOptions, Options
from trainer.data.torch_loader import batch_size_of, batches_in
from trainer.errors import ConfigError
from trainer.optim.schedule import Constant
from trainer.plan import Plan
from trainer.process.environment import Place
from trainer.trainer import Trainer


class Numbers(Dataset[Tensor]):
    """The numbers from 0, and the process that has read each."""

    offset = 0

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i + self.offset, os.getpid()])


def backwards() -> EpochOrder:
    return EpochOrder(20, lambda epoch: [(i + epoch) % 20 for i in range(19, -1, -1)])


def add_100(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.offset = 100 * (worker + 1)


def doubled(samples: list[Tensor]) -> Tensor:
    return 2 * torch.stack(samples)


def seeded(**options: Any) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(3), **options}


# Each argument of a DataLoader -> those of a loader whose batches differ without it, if the argument can change them.
CASES: dict[str, Any] = {
    "dataset": lambda: {"dataset": Numbers(15)},
    "batch_size": lambda: {"batch_size": 10},
    "shuffle": lambda: seeded(shuffle=True),
    "sampler": lambda: {"sampler": backwards()},
    "batch_sampler": lambda: {"batch_size": 1, "batch_sampler": BatchSampler(backwards(), 5, False)},
    "num_workers": lambda: {"num_workers": 2},
    "collate_fn": lambda: {"collate_fn": doubled},
    "pin_memory": lambda: {"pin_memory": True},
    "drop_last": lambda: {"drop_last": True, "batch_size": 7},
    "timeout": lambda: {"timeout": 60, "num_workers": 1},
    "worker_init_fn": lambda: {"worker_init_fn": add_100, "num_workers": 2},
    "multiprocessing_context": lambda: {"multiprocessing_context": "fork", "num_workers": 1},
    "generator": lambda: seeded(sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))),
    "prefetch_factor": lambda: {"prefetch_factor": 3, "num_workers": 1},
    "persistent_workers": lambda: {"persistent_workers": True, "num_workers": 2},
    "pin_memory_device": lambda: {"pin_memory_device": ""},
    "in_order": lambda: {"in_order": False, "num_workers": 1},
}


def made(name: str) -> DataLoader[Tensor]:
    return DataLoader(**{"dataset": Numbers(), "batch_size": 5, **CASES[name]()})


def of_bare_loop(loader: Any, epochs: int) -> list[Tensor]:
    found = []
    for epoch in range(epochs):
        for part in {loader.sampler, getattr(loader.batch_sampler, "sampler", None)}:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        found += list(loader)
    return found


class Gives:
    def __init__(self, train: Any, val: Any = None) -> None:
        self.found = {"train": train, "val": val}

    def data(self, split: str) -> Any:
        return self.found[split]


def test_each_argument_of_a_data_loader_has_a_case():
    assert set(inspect.signature(DataLoader.__init__).parameters) - {"self"} == CASES.keys()


@pytest.mark.filterwarnings("ignore:.*pin_memory")
@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_a_bare_loop(name):
    expected = of_bare_loop(bare := made(name), 2)
    loader = open_loader(Gives(made(name), made(name)), batch=bare_size(bare), options=DataOptions(workers=0))
    trained = [whole(step).batches[0] for step in itertools.islice(loader.train(0), len(expected))]
    validated = [micro.batch for micro in loader.validate()]
    loader.close()
    first = [batch[:, 0].tolist() for batch in of_bare_loop(made(name), 1)]
    assert [batch[:, 0].tolist() for batch in trained] == [batch[:, 0].tolist() for batch in expected]
    assert [batch[:, 0].tolist() for batch in validated] == first
    processes = {int(pid) for batch in trained for pid in batch[:, 1]} if name != "collate_fn" else {os.getpid()}
    passes = 1 if name == "persistent_workers" else 2
    assert len(processes) == (bare.num_workers * passes or 1) and (os.getpid() in processes) == (not bare.num_workers)


def bare_size(loader: Any) -> int:
    return batch_size_of(loader) or 0


def test_samples_of_a_loader_that_trains_and_validates_are_not_mixed():
    """Workers that persist belong to one pass at a time."""
    both = DataLoader(Numbers(), 5, num_workers=1, persistent_workers=True)
    loader = open_loader(Gives(both, both), batch=5, options=DataOptions(workers=0))
    steps = loader.train(0)
    found = [whole(next(steps)).batches[0][0, 0].item()]
    assert [micro.batch[0, 0].item() for micro in loader.validate()] == [0, 5, 10, 15]
    found += [whole(next(steps)).batches[0][0, 0].item() for _ in range(3)]
    loader.close()
    assert found == [0, 5, 10, 15]


class Counted(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(20.0))


class Sized(Counted):
    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize(
    ("make", "ranks", "batches", "size"),
    [
        (lambda: DataLoader(Numbers(), 6), 1, 4, 6),
        (lambda: DataLoader(Numbers(), 6, drop_last=True), 1, 3, 6),
        (lambda: DataLoader(Numbers(21), 5, shuffle=True), 2, 3, 5),
        (lambda: DataLoader(Numbers(), 5, sampler=WeightedRandomSampler(torch.ones(20), 40)), 2, 4, 5),
        (lambda: DataLoader(Numbers(), 5, sampler=SubsetRandomSampler(range(10))), 1, 2, 5),
        (lambda: DataLoader(Numbers(), 5, sampler=DistributedSampler(Numbers(), 2, 0)), 2, 2, 5),
        (lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(range(10), 4, False)), 1, 3, 4),
        (lambda: DataLoader(Numbers(), batch_sampler=[[1, 2], [3]]), 1, 2, None),
        (lambda: DataLoader(Numbers(), None), 1, 20, None),
        (lambda: DataLoader(Sized(), 6), 1, 4, 6),
        (lambda: DataLoader(Counted(), 6), 1, None, 6),
        (lambda: [torch.ones(3)] * 7, 1, 7, None),
        (lambda: iter(()), 1, None, None),
    ],
)
def test_the_batches_of_a_pass_are_known(make, ranks, batches, size):
    assert (batches_in(make(), ranks), batch_size_of(make())) == (batches, size)


class Fits:
    """A line through points; `data` gives DataLoaders."""

    def __init__(self, **options: Any) -> None:
        self.options, self.seen = options, list[int]()

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        x = torch.arange(70.0).view(-1, 1)
        return DataLoader(TensorDataset(x / 70, x), **{"batch_size": 16, **self.options})

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            self.seen.append(len(batch[0]))
        return (model(batch[0]) - batch[1] / 70).square().mean()


@pytest.mark.parametrize(
    ("options", "batch", "limit", "steps"),
    [({}, 16, None, 10), ({"drop_last": True}, 16, None, 8), ({"drop_last": True}, 32, None, 4), ({}, 16, 3, 6)],
)
def test_two_epochs_are_two_passes(options, batch, limit, steps, tmp_path):
    """`accumulate` follows from the loader's batch size; each epoch is validated."""
    recipe, limits = Fits(**options), LimitOptions(train=limit)
    run = Options(max_epochs=2, validate_every="1 epochs", log_every_steps=1, limit_batches=limits)
    trainer = Trainer(recipe, batch=batch, options=run, data=DataOptions(workers=0))
    assert trainer.fit()["steps"] == steps
    batches = [16, 16, 16, 16, 6][: limit or 4 + (not options)]
    assert recipe.seen == batches * 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            lambda split: (DataLoader(Numbers(), 5), DataLoader(Numbers(), 5)),
            r"recipe\.data\('train'\): returned a tuple with a DataLoader; return one, of a ConcatDataset of their",
        ),
        (
            lambda split: {"a": DataLoader(Numbers(), 5)} if split == "train" else None,
            r"recipe\.data\('train'\): returned a dict with a DataLoader; return one, of a ConcatDataset",
        ),
        (
            lambda split: DataLoader(Numbers(), 5) if split == "train" else [DataLoader(Numbers(), 5)],
            r"recipe\.data\('val'\): returned a list with a DataLoader; .*, or several as a dict of names$",
        ),
        (
            lambda split: DataLoader(Numbers(), 7),
            "batch=16: .* of 7 samples .*; set batch=7 or batch=14 or batch=21, or give the DataLoader batch_size=16",
        ),
        (
            lambda split: DataLoader(Numbers(), None),
            "a batch has 2 samples.* The DataLoader has batch_size=None, so an",
        ),
    ],
)
def test_other_data_is_refused_before_step_1(data, words, tmp_path):
    recipe: Any = Fits()
    recipe.data = data
    recipe.loss = lambda model, batch: model(batch[:, :1].float()).mean()
    with pytest.raises(Exception, match=words) as refused:
        Trainer(recipe, batch=16, options=Options(max_steps=2, validate_every=None)).fit()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rank", "world", "arguments", "words"),
    [
        (0, 2, (), "asks torch.distributed for the rank, as DistributedSampler"),
        (0, 2, (1, 0), r"DistributedSampler\(num_replicas=1, rank=0\) on rank 0 of 2"),  # as a launcher sees it
        (0, 1, (2, 0), r"DistributedSampler\(num_replicas=2, rank=0\) on rank 0 of 1"),
        (1, 2, (2, 0), r"DistributedSampler\(num_replicas=2, rank=0\) on rank 1 of 2"),
        (1, 2, (2, 1), None),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("inner", [False, True], ids=["sampler", "of a batch sampler"])
def test_a_distributed_sampler_is_for_these_ranks(rank, world, arguments, words, split, inner):
    def data(asked: str) -> Any:
        if asked != split:
            return DataLoader(Numbers(), 5)
        own: Any = DistributedSampler(Numbers(), *arguments)
        return (
            DataLoader(Numbers(), batch_sampler=BatchSampler(own, 5, False))
            if inner
            else DataLoader(Numbers(), 5, sampler=own)
        )

    recipe: Any = Fits()
    recipe.data = data
    plan = partial(
        Plan, recipe, {}, Constant(), batch=10, micro_batch=None, accumulate=None, options=Options(max_epochs=2),
        data=DataOptions(workers=0), place=Place(rank, world, rank, world), each=lambda value: [value],
    )  # fmt: skip
    if words is None:
        plan()
        return
    with pytest.raises(ConfigError, match=rf"^recipe\.data\('{split}'\): {words}.*return the DataLoader without it"):
        plan()


def test_a_transform_that_a_data_loader_would_not_get_is_refused(tmp_path):
    recipe: Any = Fits()
    recipe.transform = lambda sample, rng: sample
    with refuses("recipe.transform", "recipe.data('train')", "DataLoader"):
        Trainer(recipe, batch=16, options=Options(max_steps=2))


def test_the_samples_of_several_loaders_are_concatenated():
    """The fix that the refusal names."""
    loader = DataLoader(ConcatDataset([Numbers(10), Numbers(10)]), 5)
    assert batches_in(loader, 1) == 4


class Sets(Callback):
    """Sets an epoch of the sampler after step 2, which is the last of pass 0."""

    def __init__(self, sampler: Any, epoch: int) -> None:
        self.sampler, self.epoch = sampler, epoch

    def on_step_end(self, trainer) -> None:
        if trainer.step == 3:
            self.sampler.set_epoch(self.epoch)


class Linear:
    def __init__(self, loader: Any) -> None:
        self.loader, self.seen = loader, list[list[int]]()

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, split: str) -> Any:
        return self.loader if split == "train" else None

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.seen.append(batch[:, 0].tolist())
        return model(batch[:, :1].float()).square().mean() * 0


def test_user_code_sets_no_other_epoch_during_a_run(tmp_path):
    sampler = backwards()
    recipe = Linear(DataLoader(Numbers(), 10, sampler=sampler))
    for epoch in (1, 2):
        options = Options(max_steps=5, run_dir=f"runs/{epoch}")
        trainer = Trainer(
            recipe, {"sets": Sets(sampler, epoch)}, batch=10, options=options, data=DataOptions(workers=0)
        )
        if epoch == 1:  # that of the pass, as many loops set it
            trainer.fit()
            assert [seen[0] for seen in recipe.seen] == [19, 9, 0, 10, 1]
        else:
            why = r"^recipe\.data\('train'\): EpochOrder\.set_epoch\(2\) was called in pass 1, whose samples are drawn"
            with pytest.raises(ConfigError, match=why):
                trainer.fit()
        sampler.set_epoch(7)  # after a run it is the user's again
        assert sampler.epoch == 7
