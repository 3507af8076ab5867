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
}
RUN = [*TOY, *QUICK, "+callbacks=[probe]", "trainer.devices=2", f"trainer.accelerator={ACCELERATOR}", "data.workers=1"]
RUN += ["trainer.max_steps=12", "trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=4", "trainer.timeout_s=8"]


def train(place: Place, name: str) -> np.ndarray:
    callback = MADE[name]
    trainer = Trainer(
        Toy(depth=3), {name.split(".")[0]: callback} if callback else {}, batch=12, accumulate=2, place=place,
        data=DataOptions(workers=0),
        options=Options(
            max_steps=8, run_dir=f"runs/{name}", accelerator=ACCELERATOR, precision="fp32", ddp=DDPOptions(0.002),
            checkpoint=CheckpointOptions(every_steps=None), deterministic=True,
        ),
    )  # fmt: skip
    trainer.fit()
    return torch.cat([p.detach().flatten().cpu() for p in trainer.module.parameters()]).numpy()


@pytest.mark.parametrize("name", [name for name in MADE if name != "plain"])
def test_weights_are_those_of_plain_ddp(name):
    """`bucket` chooses the sizes by measuring, so its sums are in another order."""
    plain, other = run_ranks(2, train, "plain", timeout_s=110), run_ranks(2, train, name, timeout_s=110)
    for weights in (*plain, *other):
        assert np.abs(weights - plain[0]).max() <= (1e-5 if name == "bucket" else 0)
    assert (other[0] == other[1]).all()


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
