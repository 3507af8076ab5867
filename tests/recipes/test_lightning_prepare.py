"""`prepare_data` of a LightningModule and a LightningDataModule: which ranks call it, and what it leaves."""

from typing import Any

import pytest
from support.needs import needs
from support.ranks import run_ranks

from recipes.lightning import Lightning, LightningHooks
from trainer.config.options import DataOptions, Options
from trainer.context import Command
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [needs("lightning"), pytest.mark.usefixtures("tmp_path")]
FLAG = "allow_zero_length_dataloader_with_multiple_devices"


def kinds(per_node: bool, calls: list[str]) -> tuple[Any, Any]:
    """A module and its data, which note that they prepare."""
    import lightning_modules

    class Module(lightning_modules.AutoEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.prepare_data_per_node = per_node

        def prepare_data(self) -> None:
            calls.append("module")
            self.prepared = len(calls)

    class Data(lightning_modules.Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.prepare_data_per_node = per_node

        def prepare_data(self) -> None:
            calls.append("data")

    return Module, Data


def made(module: Any, data: Any, place: Place | None = None, **command: Any) -> Trainer:
    recipe = Lightning(module, data)
    return Trainer(
        recipe, {"lightning": LightningHooks()}, recipe.optimizer, recipe.schedule, batch=8, place=place,
        options=Options(max_steps=1, run_dir="runs/r", timeout_s=60.0), data=DataOptions(workers=0),
        command=Command(**command),
    )  # fmt: skip


def prepared(place: Place, per_node: bool, by_launcher: bool) -> list[str]:
    """The calls on a rank, of two nodes with two ranks each."""
    calls: list[str] = []
    own = Place(place.rank, 4, place.rank % 2, 2, place.store, "test")
    trainer = made(*kinds(per_node, calls), own)
    if by_launcher:
        spec = trainer.plan.spec
        trainer.close()
        calls.clear()
        trainer = made(*kinds(per_node, calls), own, spec=spec)
    trainer.close()
    return calls


@pytest.mark.parametrize(
    ("per_node", "by_launcher", "ranks"), [(True, False, {0, 2}), (False, False, {0}), (True, True, {2})]
)
@pytest.mark.slow
def test_data_is_prepared_once_per_node_or_once_in_all(per_node, by_launcher, ranks):
    """As `DataConnector.prepare_data` of Lightning's does; a launcher has prepared its own node before."""
    found = run_ranks(4, prepared, per_node, by_launcher)
    assert found == [["data", "module"] if rank in ranks else [] for rank in range(4)]


def test_calls_are_lightnings_and_the_module_has_what_it_prepared():
    from support.lightning import by_lightning

    theirs, ours = list[str](), list[str]()
    module, data = kinds(True, theirs)
    other = by_lightning(module, data(), max_steps=1).lightning_module
    trainer = made(*kinds(True, ours))
    trainer.close()
    assert ours == theirs and trainer.module.prepared == other.prepared == 2  # pyright: ignore[reportGeneralTypeIssues]


@pytest.mark.parametrize("of_data", [False, True])
def test_ranks_without_samples_are_refused(of_data):
    module, data = kinds(True, [])
    base = data if of_data else module

    def setup(self: Any, stage: str) -> None:
        base.setup(self, stage)
        setattr(self, FLAG, True)

    own = type("Own", (base,), {"setup": setup})
    key = "recipe.datamodule" if of_data else "recipe.module"
    with pytest.raises(ConfigError, match=f"^{key}: Own sets {FLAG}=True, and a rank needs samples"):
        made(*((module, own) if of_data else (own, data)))
