"""Training has the bits of training without the monitor, and each collective is in the file with the bytes it has."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.callbacks import CHANGES, CODECS, name_of
from support.cli import MAIN, QUICK, TOY, environment
from support.messages import refuses
from support.network import Cluster, needs_cluster
from support.quick import quick, selected
from support.ranks import run_ranks
from support.sharded import flat
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.comm.bandwidth import BUS_FACTORS
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.monitors.comm_monitor import CommMonitor
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

WORLD, STEPS, EVERY = 3, 4, 2
PARAMETERS = 8 * 64 + 64 + 3 * (64 * 64 + 64) + 64 * 4 + 4
ROWS = {
    "plain": {}, "bucket": {"bucket": lambda: Bucket(mib=0.02)},
    **{row: {name_of(row): CHANGES[row]} for row in (
        "overlap", "local_sgd", "hierarchical", "shard", "shard.3",
    )},
    "int8": {"grad_compress": CODECS["int8"]},
    "pipeline": {"pipeline": lambda: PipelineParallel(stages=3, schedule="gpipe", cut=[1, 2])},
}  # fmt: skip
CASES = tuple(ROWS)
FEW = ("plain", "bucket", "int8", "hierarchical")  # in each run of the tests


class Weights(Callback):
    def on_fit_end(self, trainer) -> None:
        if trainer.step == STEPS:
            trainer.emit("on_flush")
            self.end = flat(trainer.global_model, buffers=False)


def train(place: Place, row: str, monitor: Callback | None, **options: Any) -> np.ndarray:
    weights, run = Weights(), f"{row}{' monitored' if monitor else ''}"
    callbacks = {name: make() for name, make in ROWS[row].items()}
    trainer = Trainer(
        Toy(width=64, depth=3), {**callbacks, "weights": weights} | ({"comm_monitor": monitor} if monitor else {}),
        adamw, batch=12, accumulate=2,
        options=Options(**{
            "max_steps": STEPS, "log_every_steps": EVERY, "run_dir": f"runs/{run}", "validate_every": STEPS,
            "checkpoint": CheckpointOptions(every_steps=None, every_minutes=None), **options,
        }),
        data=DataOptions(workers=0, shuffle_shards=4, shuffle_window=4),
        place=replace(place, store=f"{place.store}-{run}"),
    )  # fmt: skip
    trainer.fit()
    return weights.end


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """A stage has no numbers for the blocks of others."""
    return len(one) > 0 and np.isfinite(one).any() and np.array_equal(one, other, equal_nan=True)


def both(place: Place, rows: list[str]) -> dict[str, bool]:
    return {row: equal(train(place, row, None), train(place, row, CommMonitor())) for row in rows}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, bool]]]:
    rows = [row for row in CASES if row in {*FEW, *selected(request, "row")}]
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder / "runs", run_ranks(WORLD, both, rows)


def lines(runs: Path, row: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / f"{row} monitored" / "comm.jsonl").read_text().splitlines()]


def metrics(runs: Path, row: str) -> dict[str, float]:
    return json.loads((runs / f"{row} monitored" / "summary.json").read_text())


@pytest.mark.parametrize("row", quick(dict.fromkeys((*FEW, *CASES)), len(FEW)))
def test_bits_are_those_without_the_monitor(runs, row) -> None:
    assert [rank[row] for rank in runs[1]] == [True] * WORLD


@pytest.mark.parametrize("row", quick(dict.fromkeys((*FEW, *CASES)), len(FEW)))
def test_lines_are_consistent(runs, row) -> None:
    """Each logged step has lines of each rank; bandwidths are bytes over seconds, by the factor of nccl-tests."""
    found = lines(runs[0], row)
    assert {line["step"] for line in found} == {2, 4}
    assert {line["rank"] for line in found} == set(range(WORLD))
    for line in found:
        assert line["count"] >= 1 and line["bytes"] > 0
        if line["seconds"] is None:
            assert line["algbw"] is None and line["busbw"] is None
        else:
            assert line["algbw"] == pytest.approx(line["bytes"] / line["seconds"])
            assert line["busbw"] == pytest.approx(line["algbw"] * BUS_FACTORS[line["collective"]](line["ranks"]))


def reduced(found: list[dict[str, Any]], rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in found if line["bucket"] is not None and line["rank"] == rank]


def test_ddp_reduces_each_bucket_once_a_step(runs) -> None:
    for row, buckets in (("plain", 1), ("bucket", 2)):
        for step in (2, 4):
            own = [line for line in reduced(lines(runs[0], row)) if line["step"] == step]
            assert [line["bucket"] for line in own] == list(range(len(own))) and len(own) >= buckets
            assert {(line["collective"], line["level"], line["ranks"]) for line in own} == {("all_reduce", "inside", 3)}
            assert {line["count"] for line in own} == {EVERY}
            assert sum(line["bytes"] for line in own) == 4 * PARAMETERS


@pytest.mark.slow
@pytest.mark.parametrize("row", ["overlap"])
def test_buckets_of_overlap_keep_the_numbers_of_ddp(runs, row) -> None:
    own = reduced(lines(runs[0], row))
    assert {line["bucket"] for line in own} == {0}
    assert {line["bytes"] for line in own} == {4 * PARAMETERS}


def test_two_levels_are_three_collectives_of_a_bucket(runs) -> None:
    """With one rank a node, by the callback's knob; the place of the ranks has all on one."""
    own = [line for line in reduced(lines(runs[0], "hierarchical")) if line["step"] == 4]
    found = {(line["collective"], line["ranks"]): line["bytes"] for line in own}
    assert found == {("all_gather", 1): 4 * PARAMETERS, ("all_reduce", 3): 4 * PARAMETERS} | {
        ("reduce_scatter", 1): 4 * PARAMETERS
    }


def test_a_codec_sends_fewer_bytes_in_its_own_collectives(runs) -> None:
    own = [line for line in reduced(lines(runs[0], "int8")) if line["step"] == 4]
    assert {line["collective"] for line in own} == {"all_to_all", "all_gather"}
    assert all(line["bytes"] < 0.3 * 4 * PARAMETERS for line in own)
    assert all(line["seconds"] > 0 for line in own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "collectives"),
    [
        ("pipeline", {("send", None)}),
        ("shard", {("all_reduce", 0), ("all_gather", None)}),
        ("shard.3", {("all_gather", None), ("reduce_scatter", None)}),
    ],
)
def test_other_collectives_have_no_bucket(runs, row, collectives) -> None:
    assert collectives <= {(line["collective"], line["bucket"]) for line in lines(runs[0], row)}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["local_sgd"])
def test_buckets_of_a_meeting_are_reduced(runs, row) -> None:
    assert {line["collective"] for line in lines(runs[0], row) if line["bucket"] is not None} == {"all_reduce"}


def test_metrics_are_means_of_a_step(runs) -> None:
    found = [line for line in lines(runs[0], "plain") if line["step"] == STEPS]
    summary = json.loads((runs[0] / "plain monitored" / "summary.json").read_text())
    sent = sum(line["count"] * line["bytes"] * BUS_FACTORS[line["collective"]](3) for line in found) / WORLD / EVERY
    seconds = sum(line["count"] * line["seconds"] for line in found) / WORLD / EVERY
    assert summary["comm/mib_per_step"] == pytest.approx(sent / 2**20)
    assert summary["comm/seconds_per_step"] == pytest.approx(seconds)
    assert summary["comm/busbw_mib_s"] == pytest.approx(sent / seconds / 2**20)


class Stop(Callback):
    """Ends the run as a crash of all ranks would, after the step's lines are written."""

    def on_step_end(self, trainer) -> None:
        if trainer.step == 3:
            raise RuntimeError("stopped")


ROWS["stopped"] = {"stop": Stop}
RESUMED: dict[str, Any] = {"checkpoint": CheckpointOptions(every_steps=2), "log_every_steps": 1, "run_dir": "runs/r"}


def stopped(place: Place) -> None:
    with pytest.raises(RuntimeError, match=r"^stopped$"):
        train(place, "stopped", CommMonitor(), **RESUMED)


def resumed(place: Place) -> None:
    train(place, "plain", CommMonitor(ranks=1), **RESUMED, resume="auto")


class Agrees(Callback):
    """Asks the other ranks in each step, with and without a time limit."""

    def on_step_end(self, trainer) -> None:
        trainer.ranks.each(trainer.step)
        trainer.ranks.gather([trainer.step] * 7)


def agreeing(place: Place) -> None:
    ROWS["agreeing"] = {"agrees": Agrees}
    train(place, "agreeing", CommMonitor())


def test_agreements_of_ranks_are_no_traffic_of_training(tmp_path: Path) -> None:
    run_ranks(2, agreeing)
    assert {line["collective"] for line in lines(tmp_path / "runs", "agreeing")} == {"all_reduce"}


def test_a_resume_cuts_the_lines_after_its_checkpoint(tmp_path) -> None:
    """With more ranks than the knob allows, only rank 0 writes."""
    run_ranks(2, stopped, timeout_s=60)
    run_ranks(2, resumed, timeout_s=60)
    found = [json.loads(line) for line in Path("runs/r/comm.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["rank"]) for line in found if line["bucket"] == 0]
    assert steps == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0)]


@pytest.mark.slow
@needs_cluster
def test_a_shaped_link_has_its_rate(tmp_path) -> None:
    """Of the larger bucket, 12.6 MB, at 100 Mbit/s. Of 1,514 bytes of a frame, 1,448 are payload."""
    words = [
        "recipe.width=1024", "recipe.depth=4", "+callbacks=[comm_monitor]", "trainer.max_steps=3", "batch=12",
        "trainer.log_every_steps=3", "trainer.run_dir=runs/r", "data.workers=0",
    ]  # fmt: skip
    with Cluster(2, "100mbit") as cluster:
        codes = cluster.run([*MAIN, *TOY, *QUICK, *words], 1, environment(), cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert codes == [0, 0]
    found = [json.loads(line) for line in (tmp_path / "runs" / "r" / "comm.jsonl").read_text().splitlines()]
    rates = [line["busbw"] for line in found if line["bucket"] == 1]
    assert len(rates) == 2 and {line["level"] for line in found} == {"across"}
    assert max(rates) == pytest.approx(12.5e6 * 1448 / 1514, rel=0.05)


def test_a_bad_knob_is_refused() -> None:
    with refuses("callbacks.comm_monitor.ranks=0", "1"):
        CommMonitor(ranks=0)
