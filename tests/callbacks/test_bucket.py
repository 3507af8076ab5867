"""What is reduced at a time follows from the sizes, and changes no weight; `auto` takes the fastest and keeps to it."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback, Role, arrange
from trainer.callbacks.bucket import callback
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.overlap.callback import Overlap
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

LAYERS = 8  # of 4 KiB of weights each, and nothing else
KIB = 1 / 1024
FILTER = "ignore:find_unused_parameters=True:UserWarning"


class Stack(Toy):
    tied = skip = False

    def model(self) -> nn.Module:
        model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(LAYERS)])
        if self.tied:
            model.append(nn.Linear(32, 32, bias=False))
            model[-1].weight = model[0].weight
        return model

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"].repeat(1, 4))[:, :4] - batch["y"]).square().mean()


class Tied(Stack):
    """The last layer has the first one's weight."""

    tied = True


class Side(Stack):
    """Has a weight that no loss uses."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return model


class Root(Stack):
    """Has a weight of its own, outside of all layers."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("scale", nn.Parameter(torch.ones(4)))
        return model

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scale = getattr(model, "module", model).scale
        return (model(batch["x"].repeat(1, 4))[:, :4] * scale - batch["y"]).square().mean()


class Sometimes(Root):
    """The first of two micro-batches uses it."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += model.training
        return super().loss(model, batch) if self.calls % 2 else Stack.loss(self, model, batch)


class Count(Callback):
    """How many elements are reduced at a time, by step; and the number of DDP's buckets."""

    role = Role.COMPRESS

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def wrap_reduce(self, trainer, reduce):
        def counted(flat, bucket):
            if not trainer.rehearsing:
                self.calls.append((trainer.step, flat.numel()))
            return reduce(flat, bucket)

        return counted

    def on_fit_end(self, trainer) -> None:
        self.buckets = len(trainer.strategy.buckets())


class Slow(Callback):
    """One rank takes its time for every call, if it is to."""

    role = Role.REDUCE

    def __init__(self, slow: bool) -> None:
        self.slow = slow

    def wrap_reduce(self, trainer, reduce):
        def slowed(flat, bucket):
            if self.slow and trainer.rehearsing and trainer.rank == trainer.world - 1:
                time.sleep(0.01)
            return reduce(flat, bucket)

        return slowed


def few_are_slow(trainer, run_pass, ranks) -> float:
    """Instead of a measured time: one rank is the slower the fewer buckets there are, the others are fast."""
    run_pass()
    return 1 / max(1, len(trainer.strategy.buckets())) if trainer.rank == trainer.world - 1 else 0.001


class Small(Bucket):
    """For a model of 32 KiB; 3 and 4 lay it out alike."""

    sizes = (3 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)


class Timed(Small):
    """Takes what `few_are_slow` gives for the times."""

    def rehearse(self, trainer, run_pass) -> None:
        with patch.object(callback, "time_pass", partial(few_are_slow, trainer)):
            super().rehearse(trainer, run_pass)


WITH = {
    "nothing": dict,
    "overlap": lambda: {"overlap": Overlap()},
    "grad_compress": lambda: {"grad_compress": GradCompress("bf16")},
    "local_sgd": lambda: {"local_sgd": LocalSGD(every=2, warmup_steps=1)},
}


def fit(
    place: Place, callbacks: dict[str, Callback], recipe: type[Stack] = Stack, steps: int = 2, name: str = "run",
    resume: str | None = None, accumulate: int = 2, **ddp: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    trainer = Trainer(
        recipe(), callbacks, sgd, batch=12, accumulate=accumulate,
        options=Options(
            max_steps=steps, run_dir=f"runs/{name}", resume=resume, ddp=DDPOptions(**ddp), log_every_steps=1,
            checkpoint=CheckpointOptions(dir=f"checkpoints/{name}", every_steps=2, keep=9),
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return {name: value.clone() for name, value in trainer.module.state_dict().items()}


def reductions(place: Place, knobs: dict[str, Any], recipe: type[Stack] = Stack) -> tuple[list[tuple[int, int]], int]:
    count = Count()
    fit(place, {"bucket": Bucket(**knobs), "count": count}, recipe, bucket_mib=50.0)
    return count.calls, count.buckets


def weights(place: Place, name: str, knobs: dict[str, Any] | None, with_: str = "nothing") -> dict[str, torch.Tensor]:
    """After three steps; knobs None: without the callback."""
    own = {} if knobs is None else {"bucket": Bucket(**knobs)}
    return fit(place, own | WITH[with_](), Stack, 3, name)


LAYOUTS = [
    ({"mib": 4 * KIB}, [1] * 8),
    ({"mib": 12 * KIB}, [3, 3, 2]),
    ({"mib": 32 * KIB}, [8]),
    ({}, [8]),
    ({"mib": 12 * KIB, "first_mib": 4 * KIB}, [1, 3, 3, 1]),
    ({"first_mib": 20 * KIB}, [5, 3]),
    ({"mibs": [8 * KIB, 4 * KIB, 12 * KIB]}, [2, 1, 3, 2]),
    ({"mibs": [16 * KIB, 4 * KIB]}, [4, 1, 1, 1, 1]),
]


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("knobs", "layers"), LAYOUTS)
def test_reductions_per_step(knobs, layers):
    """With accumulation too, each bucket is reduced once a step."""
    for calls, number in run_ranks(3, reductions, knobs):
        assert calls == [(step, n * 1024) for step in range(2) for n in layers]
        assert number == len(layers)


@pytest.mark.parametrize(
    ("late", "recipe", "layers"),
    [
        (["0.*", "3.weight"], Stack, [3, 3, 2]),
        (["[1-7].weight"], Stack, [1, 7]),
        (["8.weight"], Tied, [3, 3, 1, 1]),  # by its second name
    ],
)
def test_late_ones_are_reduced_together_after_all_others(late, recipe, layers):
    for calls, number in run_ranks(3, reductions, {"mib": 12 * KIB, "late": late}, recipe):
        assert calls == [(step, n * 1024) for step in range(2) for n in layers]
        assert number == len(layers) - 1


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], value, rtol=1e-5, atol=1e-7) for name, value in other.items())


def plain(place: Place, mib: float) -> dict[str, torch.Tensor]:
    return fit(place, {}, steps=3, name="plain", bucket_mib=mib)


def test_any_layout_trains_as_one_process_does():
    """To rounding; and with the bits of DDP, where that has the same layout."""
    alone, ddp = run_ranks(1, weights, "alone", None)[0], run_ranks(3, plain, 12 * KIB)[0]
    for key, value in {"mib": 12 * KIB, "mibs": [12 * KIB], "first_mib": 4 * KIB, "late": ["2.*", "7.*"]}.items():
        for own in run_ranks(3, weights, key, {key: value}):
            assert close(own, alone)
            assert equal(own, ddp) or key not in ("mib", "mibs")


@pytest.mark.parametrize("with_", ["grad_compress", "local_sgd"])
def test_late_goes_with(with_):
    """All ranks end alike; where the codec is local to the late ones or the ranks part, nothing hangs."""
    first, *others = run_ranks(3, weights, "run", {"late": ["2.*", "7.*"]}, with_)
    assert all(equal(first, other) for other in others)


def with_residuals(place: Place, name: str, resume: str | None) -> dict[str, torch.Tensor]:
    callbacks = {"bucket": Bucket(12 * KIB, late=["0.*"]), "grad_compress": GradCompress("topk", density=0.3)}
    return fit(place, callbacks, steps=4, name=name, resume=resume)


def test_what_was_kept_back_of_each_is_its_own_after_a_resume():
    """DDP counts its own parameters, without the late ones."""
    straight = run_ranks(3, with_residuals, "straight", None)
    resumed = run_ranks(3, with_residuals, "resumed", "checkpoints/straight/straight/step-00000002")
    assert all(equal(one, other) for one, other in zip(straight, resumed, strict=True))


def test_one_of_the_root_module_is_reduced_once():
    for calls, _ in run_ranks(3, reductions, {"late": ["scale"]}, Root):
        assert calls == [(step, n) for step in range(2) for n in (8 * 1024, 4)]


def unused(place: Place, recipe: type[Stack], late: list[str]) -> str:
    with pytest.raises(RuntimeError) as caught:
        fit(place, {"bucket": Bucket(late=late)}, recipe)
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "late", "named"),
    [(Side, ["unused", "7.*"], "unused"), (Side, ["unused"], "unused"), (Sometimes, ["scale"], "scale")],
)
def test_late_ones_that_no_loss_uses_are_an_error(recipe, late, named):
    for told in run_ranks(2, unused, recipe, late):
        assert told.startswith(
            f"bucket: no gradient for {named} in the last micro-batch of a step; use every parameter"
        )


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
    kind = Small if slow == "calls" else Timed
    callbacks: dict[str, Callback] = {"bucket": kind("auto"), "slow": Slow(slow == "calls"), **WITH[with_]()}
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


@pytest.mark.parametrize(("slow", "layers"), [("calls", [8]), ("few", [1] * 8)])
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


def test_a_run_that_goes_on_keeps_what_was_chosen():
    """Though now another size would win; with other ranks it measures anew."""
    whole = run_ranks(3, tried, "calls", "nothing", "whole")
    run_ranks(3, tried, "calls", "nothing", "part", 2)
    rest = run_ranks(3, tried, "few", "nothing", "part", 4, "auto")
    assert "bucket: 0.03125 MiB, as the run began with" in log("part").partition("resumed from")[0]
    assert log("part").count("a pass takes") == 1
    for (bits, _), (other, count) in zip(whole, rest, strict=True):
        assert equal(other, bits)
        assert [n for _, n in count.calls] == [8 * 1024] * 2
    for _, count in run_ranks(2, tried, "few", "nothing", "part", 6, "auto"):
        assert [n for _, n in count.calls] == [1024] * 8 * 2
    assert log("part").count("a pass takes") == 2


@pytest.mark.parametrize("with_", ["overlap", "grad_compress", "local_sgd"])
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
        ({"mibs": [1.0, 0.0]}, "mibs=0.0: must be more than 0"),
        ({"mibs": []}, "mibs=[]: names nothing; give one at least, or null"),
        ({"late": []}, "late=[]: names nothing; give one at least, or null"),
        ({"mibs": [1.0], "mib": 4.0}, "mibs=[1.0]: has every size, so mib=4.0 says nothing; leave one out"),
        ({"mibs": [1.0], "mib": "auto"}, "mibs=[1.0]: has every size, so mib=auto says nothing; leave one out"),
        ({"mibs": [1.0], "first_mib": 4.0}, "mibs=[1.0]: has every size, so first_mib=4.0 says nothing; leave one out"),
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
        ({"late": ["x"]}, "find_unused_parameters", "leave callbacks.bucket.late out"),
        ({"late": ["x"]}, "static_graph", "leave callbacks.bucket.late out"),
        ({"late": ["x"]}, "overlap", "leave callbacks.bucket.late out"),
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


def refused(place: Place, knobs: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit(place, {"bucket": Bucket(**knobs)})
    return str(caught.value)


@pytest.mark.parametrize(
    ("late", "told"),
    [
        ("7.weihgt", "late=7.weihgt: no parameter that is trained has such a name; did you mean 7.weight or"),
        ("*", "late=['*']: is all that is trained; leave some to DDP"),
    ],
)
def test_late_names_some_parameters(late, told):
    for message in run_ranks(2, refused, {"late": [late]}):
        assert message.startswith(f"callbacks.bucket.{told}")


class OlderDDP:
    def __init__(self, module: nn.Module, bucket_cap_mb: float | None = None) -> None: ...


def test_a_torch_without_sizes_per_bucket(monkeypatch):
    monkeypatch.setattr(callback, "DistributedDataParallel", OlderDDP)
    with pytest.raises(ConfigError, match=r"^callbacks\.bucket\.first_mib=2\.0: torch .* has one size for all"):
        Bucket(first_mib=2.0)._layout(25.0)
