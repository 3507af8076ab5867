"""Two gloo ranks that share the device: the chain, and what divides work over ranks, with tensors of the device."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.callbacks import CODECS, Table
from support.gpu import DEVICE, delay, on_device
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.auto_batch import AutoBatch
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.shard.callback import Shard
from trainer.comm.reduce import Reduce
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.data.batch import Step
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = on_device
STEPS, BATCH = 8, 12


class Late(Callback):
    """Each bucket is reduced late, and leaves freed memory behind it."""

    role = Role.REDUCE

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        def late(flat: Tensor, bucket: Any) -> Tensor:
            delay(2**24)
            result = reduce(flat, bucket)
            torch.full_like(flat, -1e6)  # takes memory that somebody freed too early
            return result

        return late


SAME: Table = {  # bits of plain DDP
    "activation_checkpoint": ActivationCheckpoint,
    "activation_checkpoint.selective": lambda: ActivationCheckpoint(policy="selective"),
    "activation_checkpoint.offload": lambda: ActivationCheckpoint(policy="offload"),
    "optimizer_in_backward": OptimizerInBackward,
    "overlap": Overlap,
    "shard.1": Shard,
    "shard.2": lambda: Shard(stage=2),
}
NEAR: Table = {  # sums in another order
    "auto_batch": AutoBatch,
    "bucket": lambda: Bucket(mib=0.001),
    "hetero_batch": lambda: HeteroBatch(shares=[1.0, 3.0]),
    "hierarchical": lambda: Hierarchical(ranks_per_node=1),
    "shard.3": lambda: Shard(stage=3),
    "shard.3.offload": lambda: Shard(stage=3, offload=True),
}
OTHER: Table = {  # declared to be lossy
    **CODECS,
    "local_sgd": lambda: LocalSGD(every=2),
    "local_sgd.delay": lambda: LocalSGD(every=4, delay=2),
    "onebit_adam": lambda: OneBitAdam(warmup_steps=3),
}


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach().cpu()  # torch's gathering over gloo ends a process with rows on a GPU
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]


class End(Callback):
    """The losses, and the weights while the ranks are together."""

    def __init__(self) -> None:
        self.losses = list[float]()

    def on_step_end(self, trainer) -> None:
        self.losses.append(trainer.metrics["train/loss"])

    def on_fit_end(self, trainer) -> None:
        if trainer.step:
            trainer.emit("on_flush")
            state = trainer.global_model.state_dict()
            self.weights = torch.cat([whole(state[name]).flatten().cpu() for name in sorted(state)]).numpy()


def two_on_one(place: Place, make: dict[str, Callable[[], Callback]]) -> tuple[np.ndarray, list[float]]:
    """Weights and losses of a run of two ranks, which `pick_device` would refuse."""
    end = End()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.comm.ranks.pick_device", lambda *_: DEVICE)
        trainer = Trainer(
            Toy(depth=3), {**{name: each() for name, each in make.items()}, "end": end}, adamw,
            batch=BATCH, accumulate=3, place=place, data=DataOptions(workers=0),
            options=Options(
                max_steps=STEPS, run_dir=f"runs/{'-'.join(make)}", backend="gloo", precision="fp32",
                ddp=DDPOptions(0.002), log_every_steps=1, checkpoint=CheckpointOptions(every_steps=None),
            ),
        )  # fmt: skip
        trainer.fit()
    return end.weights, end.losses


class Named:
    """A row of a table, which crosses to the ranks by its name."""

    def __init__(self, table: str, name: str) -> None:
        self.table, self.name = table, name

    def __call__(self) -> Callback:
        return TABLES[self.table][self.name]()


TABLES = {"SAME": SAME, "NEAR": NEAR, "OTHER": OTHER}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[np.ndarray, list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        one, other = run_ranks(2, two_on_one, {}, timeout_s=110)
    assert (one[0] == other[0]).all()
    return one


@pytest.mark.parametrize(("table", "name"), [(t, name) for t in ("SAME", "NEAR") for name in TABLES[t]])
def test_what_is_exact_trains_as_plain_ddp_does(table, name, plain):
    for weights, losses in run_ranks(2, two_on_one, {name.split(".")[0]: Named(table, name)}, timeout_s=110):
        if table == "SAME":
            assert (weights == plain[0]).all() and losses == plain[1]
        else:
            np.testing.assert_allclose(losses, plain[1], rtol=1e-5)
            assert np.abs(weights - plain[0]).max() < 1e-5


@pytest.mark.parametrize("name", OTHER)
def test_what_is_lossy_leaves_ranks_equal_and_goes_the_same_way(name, plain):
    makes = {"c": Named("OTHER", name)}
    if "nodes" in name:
        makes["hierarchical"] = Named("NEAR", "hierarchical")
    (one, _), (other, _) = run_ranks(2, two_on_one, makes, timeout_s=110)
    assert (one == other).all() and np.isfinite(one).all()
    apart = np.abs(one - plain[0]).max()
    assert apart < 0.1 and (apart > 0 or name == "blocksparse")  # which sends all that is not zero


def test_overlap_waits_for_a_late_reduction(plain):
    for weights, _ in run_ranks(2, two_on_one, {"overlap": Named("SAME", "overlap"), "late": Late}, timeout_s=110):
        assert (weights == plain[0]).all()


class Batches(Callback):
    """Keeps the batch of each step: which samples a rank has is the order's, not the test's."""

    def __init__(self) -> None:
        self.batches = list[Any]()

    def wrap_batches(self, trainer, steps: Iterator[Step]) -> Iterator[Step]:
        for step in steps:
            self.batches.append({key: value.clone() for key, value in step.peek().items()})
            yield step


def beside_bare_ddp(place: Place) -> bool:
    """Whether the weights are those of a bare loop with torch's DDP, on the same batches: bit for bit."""
    watch, weights = Batches(), End()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.comm.ranks.pick_device", lambda *_: DEVICE)
        trainer = Trainer(
            Even(), {"watch": watch, "end": weights}, adamw, batch=BATCH, place=place, data=DataOptions(workers=0),
            options=Options(
                max_steps=STEPS, run_dir="runs/echelon", backend="gloo", precision="fp32",
                checkpoint=CheckpointOptions(every_steps=None), log_every_steps=1,
            ),
        )  # fmt: skip
        close, trainer.loop.close = trainer.loop.close, lambda: None  # the bare loop uses its groups
        trainer.fit()
        trainer.strategy.unwrap()
        torch.manual_seed(trainer.options.seed)
        model = Even().model().to(DEVICE)
        optimizer = torch.optim.AdamW(
            [{"params": [p for p in model.parameters() if p.dim() > 1]},
             {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True,
        )  # fmt: skip
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        for batch in watch.batches:
            Even().loss(ddp, {key: value.to(DEVICE) for key, value in batch.items()}).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state = model.state_dict()
        bare = torch.cat([state[name].flatten().cpu() for name in sorted(state)]).numpy()
        del ddp
        close()
    return bool((bare == weights.weights).all())


class Even(Toy):
    """The loss counts samples, of which ranks have as many."""

    def weight(self, batch: dict[str, Tensor]) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()


def test_echelon_has_the_weights_of_bare_ddp():
    assert run_ranks(2, beside_bare_ddp, timeout_s=110) == [True, True]
