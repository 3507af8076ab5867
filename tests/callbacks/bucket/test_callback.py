"""What is reduced at a time follows from the sizes, and changes no weight; `auto` takes the fastest and keeps to it."""

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.buckets import KIB, WITH, Count, equal, fit, reductions, weights
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from torch import nn

from trainer.callback import Callback, Role
from trainer.callbacks.bucket import callback
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.overlap.callback import Overlap
from trainer.composition import arrange
from trainer.errors import ConfigError
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")

FILTER = "ignore:find_unused_parameters=True:UserWarning"


class Slow(Callback):
    """One rank takes its time for every call."""

    role = Role.REDUCE

    def wrap_reduce(self, trainer, reduce):
        def slowed(flat, bucket):
            if trainer.rehearsing and trainer.rank == trainer.world - 1:
                time.sleep(0.01)
            return reduce(flat, bucket)

        return slowed


class Small(Bucket):
    """For a model of 32 KiB; 3 and 4 lay it out alike."""

    sizes = (3 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)


class Timed(Small):
    """Takes a number of buckets for a time: on the last rank `many` or `few` of them are slow, the others are fast."""

    def __init__(self, slow: str) -> None:
        super().__init__("auto")
        self.slow = slow

    def rehearse(self, trainer, run_pass, batch) -> None:
        def time_pass(run_pass, ranks) -> float:
            run_pass()
            number = max(1, len(trainer.strategy.buckets()))
            slowest = float(number) if self.slow == "many" else 1 / number
            return slowest if trainer.rank == trainer.world - 1 else 0.001

        with patch.object(callback, "time_pass", time_pass):
            super().rehearse(trainer, run_pass, batch)


LAYOUTS = [
    ({"mib": 12 * KIB}, [3, 3, 2]),
    ({"mib": 12 * KIB, "first_mib": 4 * KIB}, [1, 3, 3, 1]),
    ({"mibs": [8 * KIB, 4 * KIB, 12 * KIB]}, [2, 1, 3, 2]),
    ({}, [8]),
    ({"mib": 4 * KIB}, [1] * 8),
    ({"mib": 32 * KIB}, [8]),
    ({"first_mib": 20 * KIB}, [5, 3]),
    ({"mibs": [16 * KIB, 4 * KIB]}, [4, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("knobs", "layers"), quick(LAYOUTS, 3))
def test_reductions_per_step(knobs, layers):
    """With accumulation too, each bucket is reduced once a step."""
    for calls, number in run_ranks(3, reductions, knobs):
        assert calls == [(step, n * 1024) for step in range(2) for n in layers]
        assert number == len(layers)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], value, rtol=1e-5, atol=1e-7) for name, value in other.items())


def plain(place: Place, mib: float) -> dict[str, torch.Tensor]:
    return fit(place, {}, steps=3, name="plain", bucket_mib=mib)


@pytest.mark.slow
def test_any_layout_trains_as_one_process_does():
    """To rounding; and with the bits of DDP, where that has the same layout."""
    alone, ddp = run_ranks(1, weights, "alone", None)[0], run_ranks(3, plain, 12 * KIB)[0]
    for key, value in {"mib": 12 * KIB, "mibs": [12 * KIB], "first_mib": 4 * KIB, "delayed": ["2.*", "7.*"]}.items():
        for own in run_ranks(3, weights, key, {key: value}):
            assert close(own, alone)
            assert equal(own, ddp) or key not in ("mib", "mibs")


def tried(
    place: Place,
    slow: str,
    with_: str = "nothing",
    name: str = "run",
    steps: int = 4,
    resume: str | None = None,
    **ddp: Any,
) -> tuple[dict[str, torch.Tensor], Count]:
    count = Count()
    callbacks: dict[str, Callback] = {"bucket": Timed(slow), **WITH[with_]()}
    if "grad_compress" not in callbacks:
        callbacks["count"] = count
    return fit(place, callbacks, steps=steps, name=name, resume=resume, **ddp), count


def log(name: str = "run", rank: int = 0) -> str:
    return Path(f"runs/{name}/logs/rank{rank}.log").read_text()


def times(text: str) -> dict[float, float]:
    """MiB -> ms, as measured."""
    line = next(line for line in text.splitlines() if "a pass takes" in line)
    parts = [part.split() for part in line.partition("a pass takes")[2].partition(":")[0].split(",")]
    return {float(mib): float(ms) for ms, _, _, mib, _ in parts}


@pytest.mark.parametrize(("slow", "layers"), quick([("many", [8]), ("few", [1] * 8)]))
def test_auto_takes_the_fastest_on_all_ranks(slow, layers):
    for _, count in run_ranks(3, tried, slow):
        assert count.calls == [(step, n * 1024) for step in range(4) for n in layers]  # no other DDP's hooks are left
    measured = times(log())
    assert len(measured) == 3  # layouts: 3 and 4 KiB are one, and so are 64 and all
    chosen = 3 * KIB if layers == [1] * 8 else 32 * KIB
    assert min(measured, key=lambda mib: measured[mib]) == float(f"{chosen:.4g}")
    assert f"buckets of {chosen:.4g} MiB" in log()
    (manifest,) = Path("checkpoints/run").glob("*/*4/MANIFEST.json")
    assert json.loads(manifest.read_text())["ddp"]["bucket_cap_mb"] == chosen


def timed(place: Place) -> list[tuple[int, int]]:
    count = Count()
    fit(place, {"bucket": Small("auto"), "slow": Slow(), "count": count})
    return count.calls


def test_auto_measures_the_slowest_rank():
    """By its clock: eight calls of 10 ms each are not the fastest."""
    calls = run_ranks(3, timed)
    measured = times(log())
    chosen = min(measured, key=lambda mib: measured[mib])
    assert chosen > 4 * KIB
    for own in calls:
        assert [n for step, n in own if step == 1] == [round(chosen / KIB) * 256] * round(32 * KIB / chosen)


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_what_was_chosen():
    """Though now another size would win; with other ranks it measures anew."""
    whole = run_ranks(3, tried, "many", "nothing", "whole")
    run_ranks(3, tried, "many", "nothing", "part", 2)
    rest = run_ranks(3, tried, "few", "nothing", "part", 4, "auto")
    assert "bucket: buckets of 0.03125 MiB, the size in the checkpoint" in log("part").partition("resumed from")[0]
    assert log("part").count("a pass takes") == 1
    for (bits, _), (other, count) in zip(whole, rest, strict=True):
        assert equal(other, bits)
        assert [n for _, n in count.calls] == [8 * 1024] * 2
    for _, count in run_ranks(2, tried, "few", "nothing", "part", 6, "auto"):
        assert [n for _, n in count.calls] == [1024] * 8 * 2
    assert log("part").count("a pass takes") == 2


@pytest.mark.parametrize(
    "with_",
    [
        "grad_compress",
        pytest.param("overlap", marks=pytest.mark.slow),
        pytest.param("local_sgd", marks=pytest.mark.slow),
    ],
)
def test_auto_goes_with(with_):
    """Bit for bit what the chosen size gives."""
    fixed = run_ranks(3, weights, "fixed", {"mib": 3 * KIB}, with_)
    for (auto, _), one in zip(run_ranks(3, tried, "few", with_, "run", 3), fixed, strict=True):
        assert equal(auto, one)
    assert f"buckets of {3 * KIB:.4g} MiB" in log()


@pytest.mark.filterwarnings(FILTER)
def test_auto_with_find_unused_parameters():
    """The layouts are not known then, so each size is timed."""
    run_ranks(2, unused_tried)
    assert len(times(log())) == 4


def unused_tried(place: Place) -> None:
    tried(place, "few", find_unused_parameters=True)


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"mib": 0}, "mib=0: must be more than 0"),
        ({"mib": float("inf")}, "mib=inf: must be less than inf"),
        ({"first_mib": -1.0}, "first_mib=-1.0: must be more than 0"),
        ({"mibs": [1.0, 0.0]}, "mibs.1=0.0: must be more than 0"),
        ({"mibs": []}, "mibs=[]: is empty; give at least one, or null"),
        ({"delayed": []}, "delayed=[]: is empty; give at least one, or null"),
        (
            {"mibs": [1.0], "mib": 4.0},
            "mibs=[1.0]: gives the size of every bucket, so mib=4.0 has no effect; leave one out",
        ),
        (
            {"mibs": [1.0], "mib": "auto"},
            "mibs=[1.0]: gives the size of every bucket, so mib=auto has no effect; leave one out",
        ),
        (
            {"mibs": [1.0], "first_mib": 4.0},
            "mibs=[1.0]: gives the size of every bucket, so first_mib=4.0 has no effect; leave one out",
        ),
    ],
)
def test_what_makes_no_layout_is_refused(knobs, told):
    with pytest.raises(ConfigError) as caught:
        Bucket(**knobs)
    assert str(caught.value) == f"callbacks.bucket.{told}"


@pytest.mark.parametrize(
    ("knobs", "other", "out"),
    [
        ({"first_mib": 1.0}, "find_unused_parameters", "leave callbacks.bucket.first_mib out"),
        ({"mibs": [1.0]}, "find_unused_parameters", "leave callbacks.bucket.mibs out"),
        ({"delayed": ["x"]}, "find_unused_parameters", "leave callbacks.bucket.delayed out"),
        ({"delayed": ["x"]}, "static_graph", "leave callbacks.bucket.delayed out"),
        ({"delayed": ["x"]}, "overlap", "leave callbacks.bucket.delayed out"),
    ],
)
def test_what_does_not_go_with_it_is_refused(knobs, other, out):
    callbacks = {"bucket": Bucket(**knobs)} | ({"overlap": Overlap()} if other == "overlap" else {})
    with pytest.raises(ConfigError, match=f"^bucket and {other} can't run together: .*; .*{out}$"):
        arrange(callbacks, {other})
    arrange(
        {"bucket": Bucket("auto")} | {name: c for name, c in callbacks.items() if name != "bucket"},
        {other} - {"overlap"},
    )


class OlderDDP:
    def __init__(self, module: nn.Module, bucket_cap_mb: float | None = None) -> None: ...


def test_a_torch_without_sizes_per_bucket(monkeypatch):
    monkeypatch.setattr(callback, "DistributedDataParallel", OlderDDP)
    with refuses("callbacks.bucket.first_mib=2.0", "torch"):
        Bucket(first_mib=2.0)._layout(25.0)
