"""Two GPUs, one for each rank, by NCCL: the bits of DDP, and faults of one rank. With the CPU as device, by gloo."""

import os

import numpy as np
import pytest
import torch
from support.cli import PYTHONPATH, QUICK, TOY, Result, run
from support.faults import events, resumed, troubling
from support.gpu import ACCELERATOR, ON_GPU, on_device
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = [*on_device, pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="fewer than two GPUs")]
MADE: dict[str, Callback | None] = {
    "plain": None,
    "bucket": Bucket(),
    "overlap": Overlap(),
    "shard.1": Shard(),
    "shard.2": Shard(stage=2),
    "shard.3": Shard(stage=3),
    "pipeline": PipelineParallel(stages=2, schedule="1f1b"),
}
IN_PARTS = ("shard.3", "pipeline")  # no rank has all weights
RUN = [*TOY, *QUICK, "+callbacks=[probe]", "trainer.devices=2", f"trainer.accelerator={ACCELERATOR}", "data.workers=1"]
RUN += ["trainer.max_steps=12", "trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=4", "trainer.timeout_s=8"]


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.seen.append(trainer.metrics["train/loss"])


def train(place: Place, name: str) -> tuple[np.ndarray, list[float]]:
    """The weights that this rank has, and the losses."""
    callback, losses = MADE[name], Losses()
    trainer = Trainer(
        Toy(depth=3), {"losses": losses, **({name.split(".")[0]: callback} if callback else {})},
        batch=12, accumulate=2, place=place, data=DataOptions(workers=0),
        options=Options(
            max_steps=8, run_dir=f"runs/{name}", accelerator=ACCELERATOR, precision="fp32", ddp=DDPOptions(0.002),
            checkpoint=CheckpointOptions(every_steps=None), deterministic=True, log_every_steps=1,
        ),
    )  # fmt: skip
    trainer.fit()
    own = [torch.empty(0)] if name in IN_PARTS else [p.detach().flatten().cpu() for p in trainer.module.parameters()]
    return torch.cat(own).numpy(), losses.seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[np.ndarray, list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        one, other = run_ranks(2, train, "plain", timeout_s=110)
    assert (one[0] == other[0]).all()
    return one


@pytest.mark.parametrize("name", [name for name in MADE if name != "plain"])
def test_training_is_that_of_plain_ddp(name, plain):
    """`bucket` chooses the sizes by measuring, and stages and rows sum in another order."""
    one, other = run_ranks(2, train, name, timeout_s=110)
    assert one[1] == other[1]
    np.testing.assert_allclose(one[1], plain[1], rtol=1e-5)
    if name not in IN_PARTS:
        assert (one[0] == other[0]).all()
        assert np.abs(one[0] - plain[0]).max() <= (1e-5 if name == "bucket" else 0)


def trouble(what: str, cwd, where: str = "after_step") -> Result:
    """Rank 1 makes it at step 7, in the first attempt. The ranks are forked, and each opens its GPU."""
    path = os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")])
    return run([*RUN, *troubling(what, 1, 1, 7, where)], cwd, timeout_s=240, PYTHONPATH=path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["after_step", "after_forward"])
def test_a_killed_rank_is_named_and_all_go_on_from_the_checkpoint(where, tmp_path):
    result = trouble("SIGKILL", tmp_path, where)
    assert result.code == 0, result.err
    assert "rank 1 was killed by SIGKILL" in result.err
    assert len(events(tmp_path)) == 1 and resumed(result.out) == [4]


@pytest.mark.timeout(300)
def test_a_rank_that_sleeps_longer_than_the_timeout_does_not_hang_the_others(tmp_path):
    result = trouble("sleep 600", tmp_path)
    assert result.code == 0, result.err
    assert len(events(tmp_path)) == 1 and resumed(result.out) == [4]
