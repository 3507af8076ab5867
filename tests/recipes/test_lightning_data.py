"""Data of a LightningModule: the samples that Lightning's own Trainer gives, by each sampler; what is refused."""

import inspect
from itertools import chain
from typing import Any

import pytest
import torch
from support.loaders import EpochOrder
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from recipes.lightning import Lightning, LightningHooks
from recipes.lightning.data import not_used
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError
from trainer.inference.inference import Inference
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [needs("lightning"), pytest.mark.usefixtures("tmp_path")]
ALL = TensorDataset(torch.arange(100.0).view(-1, 1))


def train_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(**{"dataset": Subset(ALL, range(80)), "batch_size": 10, **options})


def made(train: Any, val: Any = None, batches: bool = False, place: Place | None = None, **options: Any) -> Trainer:
    from lightning_modules import Loaders, Seen

    workers, batch = options.pop("workers", 0), options.pop("batch", 10)
    recipe = Lightning(Seen, Loaders(train, val), batches=batches)
    return Trainer(
        recipe, {"lightning": LightningHooks()}, recipe.optimizer, recipe.schedule, batch=batch, place=place,
        options=Options(**{"max_steps": 2, "run_dir": "runs/r", "timeout_s": 60.0, **options}),
        data=DataOptions(workers=workers),
    )  # fmt: skip


def by_lightning(train: Any, val: Any, epochs: int = 1) -> tuple[list[list[int]], dict[str, float]]:
    """The samples of each step, and the metrics of a validation."""
    import lightning as L
    from lightning_modules import Loaders, Seen

    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, enable_checkpointing=False, num_sanity_val_steps=0,
        **silent,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    trainer.fit(module := Seen(), Loaders(train, val))
    return module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


def turned() -> EpochOrder:
    return EpochOrder(40, lambda epoch: [(i + 7 * epoch) % 80 for i in range(40)])


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Any:
        return ((row,) for row in torch.arange(30.0).view(-1, 1))


LOADERS: dict[str, Any] = {
    "all": lambda: DataLoader(ALL, 10),
    "subset": lambda: DataLoader(ALL, 10, sampler=SubsetRandomSampler(range(80, 100))),
    "batches": lambda: DataLoader(ALL, batch_sampler=BatchSampler(range(80, 100), 10, False)),
    "drop_last": lambda: DataLoader(ALL, 30, drop_last=True),
    "other data": lambda: DataLoader(ALL, 10, sampler=SequentialSampler(range(20))),
    "custom": lambda: DataLoader(ALL, 8, sampler=turned()),
    "of 2 ranks": lambda: DataLoader(ALL, 10, sampler=DistributedSampler(ALL, 1, 0, shuffle=False)),
    "stream": lambda: DataLoader(Stream(), 10),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOADERS)
def test_a_validation_has_the_samples_of_its_loader(name):
    """After a run, and in `evaluate`."""
    trainer = made(train_loader, LOADERS[name])
    trainer.fit()
    expected = by_lightning(train_loader, LOADERS[name])[1]["val_seen"]
    assert trainer.validation["val/seen"] == trainer.evaluate()["val/seen"] == pytest.approx(expected)


def log_sizes(self: Any, batch: Any, batch_idx: int) -> None:
    """Log what is not additive over the samples."""
    self.log_dict({"val_size": float(len(batch[0])), "val_most": batch[0].max(), "val_index": float(batch_idx)})


@pytest.mark.filterwarnings("ignore")
def test_a_validation_has_the_batches_of_its_loader(monkeypatch):
    """Of 8 samples, in a run with micro-batches of 2."""
    import lightning_modules

    monkeypatch.setattr(lightning_modules.Seen, "validation_step", log_sizes)
    trainer = made(train_loader, lambda: DataLoader(ALL, 8), batch=2)
    trainer.fit()
    expected = by_lightning(train_loader, lambda: DataLoader(ALL, 8))[1]
    theirs = {name.replace("_", "/"): value for name, value in expected.items()}
    assert trainer.plan.micro == 2 and theirs["val/size"] == pytest.approx(7.84)
    assert trainer.validation == trainer.evaluate() == pytest.approx(theirs)
    parts = trainer.recipe, trainer.ranks, trainer.precision, trainer.plan.data
    asked = Inference(*parts, micro=4, asked=True, seed=7)  # as by `--micro-batch 4`
    assert asked.evaluate(trainer.module, "val")["val/size"] == 4


def drawn(**options: Any) -> Any:
    """A loader whose sampler has a generator of its own."""
    own = torch.Generator().manual_seed(3)
    return DataLoader(ALL, 10, generator=own, **options)


TRAINED: dict[str, Any] = {
    "sequential": train_loader,
    "custom": lambda: train_loader(sampler=turned()),
    "drop_last": lambda: train_loader(batch_size=30, drop_last=True),
    "replacement": lambda: drawn(sampler=RandomSampler(ALL, True, 40, torch.Generator().manual_seed(1))),
    "weights": lambda: drawn(
        sampler=WeightedRandomSampler([0.0, 1.0] * 50, 40, True, torch.Generator().manual_seed(1))
    ),
    "shuffle": lambda: drawn(shuffle=True),
    "batches": lambda: DataLoader(ALL, batch_sampler=BatchSampler(turned(), 10, False)),
    "stream": lambda: DataLoader(Stream(), 10),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINED)
def test_two_epochs_of_a_loaders_batches_are_those_of_lightning(name):
    """Their length is known, so `max_epochs` ends the run."""
    size = 30 if name == "drop_last" else 10
    epochs = 1 if name == "shuffle" else 2  # between epochs, Lightning draws from the loader's generator
    trainer = made(TRAINED[name], batches=True, batch=size, max_steps=None, max_epochs=epochs)
    trainer.fit()
    expected = by_lightning(TRAINED[name], None, epochs)[0]
    assert trainer.module.seen == expected and trainer.step == len(expected)  # pyright: ignore[reportGeneralTypeIssues]


class Opened(Dataset[Any]):
    """Numbers that each data worker opens for itself."""

    file: Any = None

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> tuple[Tensor]:
        return (torch.tensor([self.file[i]]),)


def open_file(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.file = [i / 100 for i in range(100)]


def opened() -> DataLoader[Any]:
    return DataLoader(Opened(), 10, num_workers=1, worker_init_fn=open_file)


@pytest.mark.parametrize("batches", [False, True])
def test_a_workers_function_is_called(batches):
    trainer = made(opened, opened, batches, workers=1)
    trainer.fit()
    assert trainer.validation["val/seen"] == pytest.approx(0.495)


def test_a_workers_function_needs_workers():
    with refuses("data.workers=0", "recipe.data('train')", "worker_init_fn", "data.workers=1"):
        made(opened)


def test_what_the_samples_do_not_take_with_them_is_logged(capsys):
    made(lambda: train_loader(num_workers=1, drop_last=True, persistent_workers=True))
    line = "not used: batch_size=10, drop_last=True, num_workers=1, persistent_workers=True\n"
    assert line in capsys.readouterr().out


def test_an_epoch_that_a_hook_sets_for_a_pass_that_has_begun_is_refused():
    trainer = made(TRAINED["custom"], batches=True, batch=10)
    module, sampler = trainer.module, trainer.recipe.loaders["train"].sampler
    module.on_train_epoch_start = lambda: sampler.set_epoch(2 * module.current_epoch + 1)
    with refuses("recipe.data('train')", "EpochOrder.set_epoch(1)", "set_epoch(0)"):
        trainer.fit()


ASKED: dict[str, Any] = {  # each with a value that is not torch's default
    "batch_size": 10, "num_workers": 1, "pin_memory": True, "drop_last": True, "timeout": 5.0,
    "multiprocessing_context": "fork", "generator": torch.Generator(), "prefetch_factor": 4, "persistent_workers": True,
    "pin_memory_device": "cuda", "in_order": False,
}  # fmt: skip
WITH_SAMPLES = {"dataset", "collate_fn", "worker_init_fn", "shuffle"}  # all samples are taken, in Echelon's order
REFUSED = {"sampler", "batch_sampler"}


@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_a_loader_is_taken_with_the_samples_or_refused_or_logged():
    assert WITH_SAMPLES | REFUSED | ASKED.keys() == set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    assert set(not_used(train_loader(**ASKED))) == ASKED.keys()
    assert not_used(train_loader(num_workers=1)) == ["batch_size", "num_workers"]


@pytest.mark.parametrize("name", ["custom", "replacement", "weights", "batches"])
def test_a_training_loader_with_an_order_of_its_own_is_refused_or_its_batches_are_taken(name):
    with pytest.raises(ConfigError, match=r"Sampler|EpochOrder.* has an order of its own; give recipe\.batches=true"):
        made(TRAINED[name])


def on_ranks(place: Place, train: str, val: str, batches: bool) -> Any:
    try:
        trainer = made(TRAINED[train], LOADERS[val], batches, place, batch=20, max_steps=None, max_epochs=1)
        trainer.fit()
    except Exception as error:  # on the other rank, that of a connection
        return str(error)
    return trainer.module.seen, trainer.validation["val/seen"], trainer.step


def test_ranks_share_the_samples_of_torchs_samplers():
    """Each of 40 drawn ones has weight above 0; the validation has the 20 of its sampler."""
    ranks = run_ranks(2, on_ranks, "weights", "subset", True)
    own = [list(chain(*seen)) for seen, _, _ in ranks]
    assert [len(samples) for samples in own] == [20, 20] and own[0] != own[1]
    assert all(i % 2 for i in chain(*own))
    assert {(value, steps) for _, value, steps in ranks} == {(89.5, 2)}


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        ("sequential", "batches", "val_dataloader(): BatchSampler has an order of its own, which Echelon can't split"),
        (
            "custom",
            "all",
            "train_dataloader(): EpochOrder has an order of its own, which Echelon can't split over 2 ranks",
        ),
        ("sequential", "of 2 ranks", "val_dataloader(): DistributedSampler(num_replicas=1): there are 2 rank(s)"),
    ],
)
def test_a_sampler_that_gives_each_rank_the_same_samples_is_refused(train, val, words):
    said = run_ranks(2, on_ranks, train, val, True)[0]
    assert said.startswith(words) and "\n" not in said
