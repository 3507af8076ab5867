"""LightningModules as they are: the losses, rates, hooks and weights of Lightning's own Trainer, on 1 rank and on 2."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.callbacks import CHANGES, CODECS, name_of
from support.cli import QUICK, run
from support.messages import refuses
from support.needs import needs
from support.ranks import run_ranks

from recipes.lightning import Lightning, LightningHooks
from recipes.lightning.data import Batches
from trainer.callback import Callback
from trainer.composition import arrange
from trainer.config.build import build
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.iterable import hint_at_samples
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.testing.contract import load
from trainer.trainer import Trainer

pytestmark = needs("lightning")
ALL = {**CHANGES, **CODECS}
MODULES = ("AutoEncoder", "Classifier", "Cycled", "Frozen")
STEPS, MICRO = 24, 4  # 12 batches are an epoch of one rank, and 6 of two


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_step_end(self, trainer) -> None:
        self.losses.append(trainer.losses[-1].item())
        self.logged.append(dict(trainer.metrics))


def module_of(name: str) -> Any:
    if name == "BoringModel":
        from lightning.pytorch.demos.boring_classes import BoringModel

        return BoringModel
    import lightning_modules

    return getattr(lightning_modules, name)


def datamodule_of(name: str) -> Any:
    """The data of both, and the samples of its batches."""
    if name == "BoringModel":
        from lightning.pytorch.demos.boring_classes import BoringDataModule

        torch.manual_seed(5)
        return BoringDataModule(), 1
    import lightning_modules

    return lightning_modules.Numbers(), MICRO


def result(module: torch.nn.Module, losses: list[float]) -> dict[str, Any]:
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"weights": weights, "losses": losses, **{k: getattr(module, k, None) for k in ("calls", "rates")}}


def by_echelon(place: Place, name: str, accumulate: int = 1) -> dict[str, Any]:
    (datamodule, micro), losses = datamodule_of(name), Losses()
    recipe = Lightning(module_of(name), datamodule, batches=True)
    trainer = Trainer(
        recipe, {"lightning": LightningHooks(), "losses": losses}, recipe.optimizer, recipe.schedule,
        batch=micro * accumulate * place.world, accumulate=accumulate,
        options=Options(max_steps=STEPS, log_every_steps=1, seed=7, run_dir=f"runs/{name}{accumulate}"),
        data=DataOptions(workers=0), place=replace(place, store=f"{place.store}-{name}{accumulate}"),
    )  # fmt: skip
    trainer.fit()
    return result(trainer.module, losses.losses) | {"validation": trainer.validation, "logged": losses.logged}


def by_lightning(place: Place, name: str, accumulate: int = 1) -> dict[str, Any]:
    import lightning as L
    import torch.distributed as dist
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Environment(LightningEnvironment):
        creates_processes_externally = True
        world_size = lambda self: place.world  # noqa: E731
        global_rank = local_rank = lambda self: place.rank
        set_world_size = set_global_rank = lambda self, value: None

    class Losses(L.Callback):
        losses: list[float] = []

        def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
            if (index + 1) % accumulate == 0:
                self.losses.append(outputs["loss"].item() * accumulate)

    if place.world > 1:
        dist.init_process_group("gloo", f"file://{place.store}-theirs-{name}", rank=place.rank, world_size=place.world)
    losses = Losses()
    losses.losses = []
    (datamodule, _) = datamodule_of(name)
    L.seed_everything(7)
    module = module_of(name)()
    trainer = L.Trainer(
        accelerator="cpu", devices=place.world, max_steps=STEPS, accumulate_grad_batches=accumulate,
        strategy=DDPStrategy(process_group_backend="gloo") if place.world > 1 else "auto",
        plugins=[Environment()] if place.world > 1 else None, callbacks=[losses], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, datamodule)
    found = result(module, losses.losses)
    return found | {"validation": {k: float(v) for k, v in trainer.callback_metrics.items()}}


def both(place: Place, cases: list[tuple[str, int]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    import logging
    import warnings

    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    environment = dict(os.environ)
    results = []
    for name, accumulate in cases:
        ours = by_echelon(place, name, accumulate)
        theirs = by_lightning(place, name, accumulate)
        if dist.is_initialized():
            dist.destroy_process_group()
        results.append((ours, theirs))
    os.environ.clear()
    os.environ.update(environment)
    return results


CASES = [("BoringModel", 1), *((name, 1) for name in MODULES), ("Classifier", 2)]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_losses_weights_rates_and_hooks_are_those_of_lightnings_trainer(world, tmp_path):
    for rank, results in enumerate(run_ranks(world, both, CASES)):
        for (name, accumulate), (ours, theirs) in zip(CASES, results, strict=True):
            where = f"{name}, accumulate={accumulate}, rank {rank} of {world}"
            assert len(ours["losses"]) == STEPS, where
            assert ours["losses"] == theirs["losses"], where  # bit for bit
            for key, value in theirs["weights"].items():
                assert torch.equal(ours["weights"][key], value), f"{where}: {key}"
            assert ours["rates"] == theirs["rates"], where
            assert ours["calls"] == theirs["calls"], where
            if (name, accumulate, world) == ("Classifier", 1, 1):  # on more ranks Lightning repeats samples
                assert ours["calls"][0] == "epoch start"
                for key in ("acc", "loss"):
                    assert ours["validation"][f"val/{key}"] == pytest.approx(theirs["validation"][f"val_{key}"]), where
                assert ours["logged"][0].keys() >= {"train/loss", "train/mean", "train/lr"}


def train(datamodule: Any, name: str, callbacks: Any = None, **options: Any) -> Trainer:
    recipe = Lightning(module_of(name), datamodule)
    trainer = Trainer(
        recipe, {"lightning": LightningHooks(), **(callbacks or {})}, recipe.optimizer, recipe.schedule, batch=8,
        options=Options(**{"max_steps": 8, "log_every_steps": 1, "run_dir": "runs/r", "validate_every": 2, **options}),
        data=DataOptions(workers=0),
    )  # fmt: skip
    trainer.fit()
    return trainer


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_the_end_of_an_epoch_logs_is_lightnings(world, tmp_path):
    """The last step ends an epoch; the ends before it are in the metrics of their steps."""
    for ((ours, theirs),) in run_ranks(world, both, [("EpochEnd", 1)]):
        of_epochs = [metrics for metrics in ours["logged"] if "train/batches" in metrics]
        assert [metrics["train/batches"] for metrics in of_epochs] == [12 / world * n for n in range(1, 2 * world + 1)]
        for name in ("acc_epoch", "batches"):
            assert of_epochs[-1][f"train/{name}"] == pytest.approx(theirs["validation"][f"train_{name}"])


@pytest.mark.parametrize(
    ("name", "step", "of_epoch"),
    [("EpochEnd", 13, ("acc_epoch", "batches")), ("MeanOfEpoch", 8, ("acc_epoch", "size_epoch", "loss_epoch"))],
)
def test_what_an_epoch_has_logged_outlives_a_resume(name, step, of_epoch, tmp_path):
    """Step 12 ends an epoch, and step 15 is logged."""
    often = {"max_steps": 15, "log_every_steps": 5, "checkpoint": CheckpointOptions(every_steps=step)}
    data = datamodule_of(name)[0]
    straight = train(data, name, run_dir="runs/a", **often).last_metrics
    resumed = train(data, name, run_dir="runs/b", resume=f"ckpt/a/step-{step:08d}", **often).last_metrics
    for key in of_epoch:
        assert resumed[f"train/{key}"] == straight[f"train/{key}"]


def test_sums_of_an_epoch_are_shared_by_other_ranks():
    """Two ranks go on as three: the mean of the epoch is that of all batches."""
    hooks = LightningHooks()
    hooks.world = 3
    merged = hooks.merge_rank_states(iter([{"sums": {"acc": [6.0, 4]}}, {"sums": {"acc": [9.0, 5], "size": [3.0, 3]}}]))
    assert merged == {"sums": {"acc": [pytest.approx(5.0), pytest.approx(3.0)], "size": [1.0, 1.0]}}


@pytest.mark.parametrize("name", ["Classifier", "OnPlateau"])
def test_a_resume_repeats_the_bits_in_echelons_order_of_samples(name, tmp_path):
    (datamodule, _), often = datamodule_of(name), {"checkpoint": CheckpointOptions(every_steps=4)}
    straight, losses = train(datamodule, name, run_dir="runs/a", **often), Losses()
    resumed = train(datamodule, name, {"losses": losses}, run_dir="runs/b", resume="ckpt/a/step-00000004", **often)
    assert all(map(torch.equal, straight.module.state_dict().values(), resumed.module.state_dict().values()))
    assert straight.validation == resumed.validation and len(losses.losses) == 4
    if name == "OnPlateau":  # validations after steps 2, 4 and 6 halve the rate
        assert losses.logged[-1]["train/lr"] == 0.1 / 8


def test_a_checkpoint_of_lightning_begins_a_run_and_an_export_loads_in_lightning(tmp_path):
    import lightning as L

    (datamodule, _), kind = datamodule_of("AutoEncoder"), module_of("AutoEncoder")
    torch.manual_seed(1)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    theirs = L.Trainer(accelerator="cpu", max_steps=2, enable_checkpointing=True, num_sanity_val_steps=0, **silent)
    theirs.fit(module := kind(), datamodule)
    theirs.save_checkpoint("theirs.ckpt")
    trainer = train(datamodule, "AutoEncoder", max_steps=0, init_from="theirs.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(trainer.module.state_dict()[name], value)
    loaded = kind.load_from_checkpoint("runs/r/export/model.ckpt")
    assert loaded.hparams["inputs"] == 12
    assert all(map(torch.equal, loaded.state_dict().values(), module.state_dict().values()))


@pytest.mark.slow
def test_the_command_trains_a_module_by_its_name(tmp_path):
    words = ["recipe=lightning", "recipe.module=lightning_modules.Classifier", "recipe.module_args={classes: 5}"]
    words += [
        "recipe.datamodule=lightning_modules.Numbers",
        "batch=8",
        "trainer.max_epochs=1",
        "trainer.devices=2",
        *QUICK,
    ]
    words += ["trainer.run_dir=runs/l", "trainer.log_every_steps=2"]
    done = run([*words, "trainer.allow_targets=[lightning_modules]"], tmp_path)
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "runs/l/summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (6, 48) and "train/mean" in summary and "val/acc" in summary
    assert (tmp_path / "runs/l/export/model.ckpt").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Manual", "Manual sets automatic_optimization=False"),
        ("Two", "returned 2 optimizers, and Echelon steps one"),
        ("OwnBackward", "OwnBackward overrides backward, which Echelon does not call"),
        ("OnTraining", "monitor='train_loss': ReduceLROnPlateau follows the validation; log a metric in"),
        ("SameNames", "self.log('train_acc'): is 'acc' here, as 'acc' is, and both would be one mean; rename one"),
        ("Numbers", "lightning_modules.Numbers: is not a LightningModule"),
    ],
)
def test_what_echelon_cant_run_is_refused_by_name(name, words, tmp_path):
    with pytest.raises(ConfigError) as refused:
        train(datamodule_of("")[0], name)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_mean_of_the_epoch_that_a_step_asks_for_is_lightnings(tmp_path):
    """Lightning calls it `train_acc` where no step has it. On several ranks it has rank 0's, and Echelon the mean."""
    (((ours, theirs),),) = run_ranks(1, both, [("MeanOfEpoch", 1)])
    last = ours["logged"][-1]
    for name, of_lightning in (("acc", "train_acc"), ("size", "size_epoch"), ("loss", "train_loss_epoch")):
        assert last[f"train/{name}_epoch"] == pytest.approx(theirs["validation"][of_lightning])
    assert last["train/size"] != pytest.approx(last["train/size_epoch"]) and "train/acc" not in last
    assert ["train/acc_epoch" in metrics for metrics in ours["logged"]] == [step in (12, 24) for step in range(1, 25)]


def test_batches_of_a_loader_are_no_samples():
    """A LightningDataModule's loader has no attribute to set."""
    assert hint_at_samples(Batches(torch.utils.data.DataLoader([1.0]), "train", lambda: 0)) == ""


def test_a_step_that_fails_has_ended(tmp_path):
    """Memory may run out, and `auto_batch` goes on."""
    recipe = Lightning(module_of("Classifier"))

    def full(*_: Any, **__: Any) -> None:
        assert recipe.view.in_training_step
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        recipe._training_step(full, recipe._make_module(), torch.zeros(2, 4), 0)
    assert not recipe.view.in_training_step


@pytest.mark.parametrize(
    ("read", "log_every_steps", "refused"),
    [
        (lambda metrics: metrics["train_lr"] == metrics.get("lr") == metrics["train/lr"] == 0.01, 1, ""),
        (lambda metrics: metrics.get("train_lr", metrics == {}), 50, ""),
        (lambda metrics: "train_lr" in metrics and "lr" in metrics and "train/lr" in metrics, 1, ""),
        (lambda metrics: "acc" not in metrics and "train_lr" not in dict(metrics), 1, ""),
        (lambda metrics: "val_loss" in metrics, 1, r"\['val_loss'\]: has numbers of training alone"),
        (lambda metrics: metrics["val_loss"], 1, r"\['val_loss'\]: has numbers of training alone; keep those of"),
        (lambda metrics: metrics.get("val_loss"), 1, r"\['val_loss'\]: has numbers of training alone"),
        (lambda metrics: metrics["acc"], 1, r"\['acc'\]: is not there, since this step has train/loss, train/lr"),
        (lambda metrics: metrics["acc"], 50, r"\['acc'\]: .* is not logged; give trainer.log_every_steps=1"),
    ],
)
def test_a_module_reads_the_numbers_of_its_step(read, log_every_steps, refused, tmp_path, monkeypatch):
    kind = module_of("ReadsMetrics")
    monkeypatch.setattr(kind, "read", staticmethod(read))
    refuses = pytest.raises(ConfigError, match=rf"^self\.trainer\.callback_metrics{refused}")
    with refuses if refused else nullcontext():
        train(datamodule_of("")[0], "ReadsMetrics", log_every_steps=log_every_steps, max_steps=3, validate_every=None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.Module", "No module named"),
        ("json.decoder.JSONDecoder", "is not a LightningModule"),
        (
            "subprocess.Popen",
            "subprocess is not a package that configs may name; .*allow_targets=.nowhere,json,subprocess",
        ),
    ],
)
def test_a_name_that_is_no_module(name, words):
    node = {"_target_": "recipes.lightning.Lightning", "module": name}
    with pytest.raises(ConfigError, match=f"^recipe.module={name}: .*{words}"):
        build("recipe", node, ("torch.nn", "nowhere", "json"))
    with pytest.raises(ConfigError, match=f"^recipe.module={name}: is a name, which only a config can give"):
        Lightning(name)


def test_without_the_callback_the_way_out_is_named(tmp_path):
    recipe = Lightning(module_of("AutoEncoder"), datamodule_of("AutoEncoder")[0])
    with refuses("callbacks", "lightning", "callbacks"):
        Trainer(recipe, {}, recipe.optimizer, recipe.schedule, batch=8, options=Options(max_steps=1)).fit()


BESIDE = ("ema", "activation_checkpoint", "shard", "shard.2", "shard.3", "optimizer_in_backward", "overlap", "bf16")


def beside(place: Place, rows: tuple[str, ...]) -> list[list[torch.Tensor]]:
    results = []
    for i, row in enumerate(("", *rows)):
        recipe = Lightning(module_of("Deep"), datamodule_of("Deep")[0])
        own = {name_of(row): ALL[row]()} if row else {}
        trainer = Trainer(
            recipe, {"lightning": LightningHooks(), **own}, recipe.optimizer, recipe.schedule, batch=8,
            options=Options(max_steps=4, run_dir=f"runs/{i}"), data=DataOptions(workers=0),
            place=replace(place, store=f"{place.store}-{i}"),
        )  # fmt: skip
        trainer.fit()
        results.append([value.float() for value in load(Path(f"ckpt/{i}/step-00000004"))["model"].values()])
    return results


@pytest.mark.slow
def test_callbacks_work_beside(tmp_path):
    plain, *others = run_ranks(2, beside, BESIDE)[0]
    for row, weights in zip(BESIDE, others, strict=True):
        limits = {"rtol": 0.1, "atol": 2e-2} if row == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
        for own, value in zip(weights, plain, strict=True):
            torch.testing.assert_close(own, value, **limits, msg=row)


def test_a_pipeline_is_refused_by_name():
    with pytest.raises(ConfigError, match="a training_step can't be cut into stages"):
        arrange({"lightning": LightningHooks(), "pipeline": ALL["pipeline"]()}, set())


def test_another_split_is_refused_by_name(tmp_path):
    recipe = Lightning(module_of("Classifier"), datamodule_of("Classifier")[0])
    with refuses("recipe=lightning", "split=test"):
        recipe.data("test")
