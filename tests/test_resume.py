"""Killed is not lost: 20 steps are 7, a kill, and 13, bit for bit on as many ranks, sample for sample on others."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.shard.callback import Shard
from trainer.checkpoint.serialize import optimizer_state
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.data.sampling.order import Order
from trainer.loggers.metrics_file import MetricsFile
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS, KILL, BATCH, SAMPLES = 20, 7, 12, 100  # an epoch is 8.3 steps: the kill is in the middle of the first


class Die(Callback):
    """SIGKILL in the middle of a step, on every rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, trainer) -> None:
        if trainer.step == self.at:
            if trainer.saver.writing is not None:
                trainer.saver.writing.result()  # else what there is to go on from would depend on the disk
            if trainer.world > 1:
                dist.barrier()  # and on who is killed first
            os.kill(os.getpid(), signal.SIGKILL)


class Audit(Callback):
    """The samples of every step, one file a rank. `kill`: when this attempt is."""

    def __init__(self, kill: int) -> None:
        self.kill = kill

    def on_step_end(self, trainer) -> None:
        with open(trainer.run_dir / f"audit-{self.kill}-{trainer.rank}", "a") as file:
            file.write(json.dumps([trainer.step, [list(ref) for ref in trainer.data.refs]]) + "\n")


def run(place: Place, run_dir: str, steps: int, resume: str | None, kill: int, variant: dict, every: int = KILL):
    callbacks = {"metrics_file": MetricsFile(), "audit": Audit(kill), **({"die": Die(kill)} if kill else {})}
    if variant.get("ema", True):
        callbacks["ema"] = EMA(0.9)
    if variant.get("overlap"):
        callbacks["overlap"] = Overlap()
    if stage := variant.get("stage"):
        callbacks["shard"] = Shard(stage)
    trainer = Trainer(
        Toy(SAMPLES, width=96, depth=3, dropout=0.2),
        callbacks,
        batch=BATCH,
        accumulate=variant.get("accumulate", 1),
        options=Options(
            max_steps=steps, validate_every=5, log_every_steps=1, run_dir=run_dir, resume=resume, seed=3,
            clip_norm=variant.get("clip"),
            checkpoint=CheckpointOptions(every_steps=every), ddp=DDPOptions(bucket_mib=0.02),
        ),
        data=DataOptions(workers=variant.get("workers", 0), shuffle_shards=variant.get("lanes", 5), shuffle_window=4),
        place=place,
    )  # fmt: skip
    trainer.fit()
    bits = {name: p.detach().numpy() for name, p in trainer.module.named_parameters()}
    for name, state in optimizer_state(trainer.optimizer, trainer.module).items():
        bits |= {f"{name}/{key}": torch.as_tensor(value).numpy() for key, value in state.items()}
    if "ema" in callbacks:
        bits |= {f"ema/{name}": p.detach().numpy() for name, p in trainer.eval_model.named_parameters()}
    return bits


def columns(run_dir: str) -> list[dict]:
    """Every line of metrics.jsonl without its times."""
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k in ("step", "samples") or k.startswith(("train/", "val/"))}
        for line in lines
    ]


VARIANTS = {
    "clip": {"clip": 0.5},
    "accumulate": {"accumulate": 2},
    "overlap-accumulate": {"overlap": True, "accumulate": 2},
    "workers": {"workers": 2},
    "shard": {"stage": 2, "clip": 0.5, "accumulate": 2},
}
QUICK = ("overlap-accumulate",)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if name in QUICK else pytest.mark.slow) for name, v in VARIANTS.items()],
    ids=VARIANTS,
)
def test_a_killed_run_resumes_bitwise(variant, tmp_path):
    straight = run_ranks(3, run, "runs/straight", STEPS, None, 0, variant)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(3, run, "runs/killed", STEPS, None, KILL + 2, variant)  # two steps after the checkpoint
    resumed = run_ranks(3, run, "runs/killed", STEPS, "auto", 0, variant)
    for a, b in zip(straight, resumed, strict=True):
        assert a.keys() == b.keys()
        assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []
    assert columns("runs/straight") == columns("runs/killed")
    assert [line["step"] for line in columns("runs/killed") if "train/loss" in line] == list(range(1, STEPS + 1))


def come_and_go(segments: list[tuple[int, int]], lanes: int) -> None:
    """Segments of so many ranks and workers, each killed two steps after a checkpoint but the last: the samples of the
    steps that count are the planned ones, once each."""
    steps = 5 * len(segments) + 1
    for n, (world, workers) in enumerate(segments):
        kill = 5 * n + 7 if n + 1 < len(segments) else 0
        variant = {"ema": False, "workers": workers, "lanes": lanes}
        with pytest.raises(AssertionError, match="died") if kill else contextlib.nullcontext():
            run_ranks(world, run, "runs/r", steps, "auto", kill, variant, 5)
    seen: dict[int, list[tuple[int, ...]]] = {}
    for file in sorted(Path("runs/r").glob("audit-*")):
        kill = int(file.name.split("-")[1])
        for line in file.read_text().splitlines():
            step, refs = json.loads(line)
            if not kill or step <= kill - 2:  # else lost by the kill
                seen.setdefault(step, []).extend(tuple(ref) for ref in refs)
    order = Order([1] * SAMPLES, 3, lanes, 4)
    planned = [order.local(step * BATCH, (step + 1) * BATCH, 0, 1) for step in range(steps)]
    assert sorted(seen) == list(range(1, steps + 1))
    assert [sorted(seen[step + 1]) for step in range(steps)] == [sorted(map(tuple, refs)) for refs in planned]
    assert [line["step"] for line in columns("runs/r") if "train/loss" in line] == list(range(1, steps + 1))


def test_ranks_come_and_go_and_the_samples_stay(tmp_path):
    """5 ranks, whose parts of a batch differ, have fewer lanes than they are."""
    come_and_go([(3, 0), (5, 1)], lanes=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_also_often_over_three_epochs(tmp_path):
    come_and_go([(3, 0), (2, 1), (4, 3), (1, 0), (3, 1)], lanes=7)
