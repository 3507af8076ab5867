"""How many graphs a compiled model has, its bits, its names, and what is refused before the first step."""

import copy
import itertools
import os
import re
import shutil
import sysconfig
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from support.runs import make
from torch import Tensor, nn
from toy_recipe import Block, Net, Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.compile import Compile, refuse_missing_tools
from trainer.callbacks.ema import EMA
from trainer.errors import ConfigError
from trainer.process import heartbeat
from trainer.process.environment import Place

WORLD = 3
NUMBER = itertools.count()


@pytest.fixture(autouse=True)
def fresh(tmp_path):
    """torch keeps compiled code for the life of a process."""
    dynamo.reset()
    dynamo.utils.counters.clear()


class Watch(Callback):
    """The metrics of each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_step_end(self, trainer) -> None:
        self.seen.append({k: v for k, v in trainer.metrics.items() if k.startswith("compile/")})


def train(
    recipe: Any = None, knobs: dict[str, Any] | None = None, others: dict[str, Callback] | None = None, **options
):
    """Trains 3 steps; a batch of 12 in 2 micro-batches, and 13 samples of validation in 6, 6 and 1."""
    watch = Watch()
    compiled = {} if knobs is None else {"compile": Compile(**{"backend": "aot_eager", **knobs})}
    trainer = make(
        recipe or Toy(depth=3, dropout=0.1),
        {**compiled, **(others or {}), "watch": watch},
        **{"max_steps": 3, "log_every_steps": 1, "run_dir": f"runs/{next(NUMBER)}", **options},
    )
    trainer.fit()
    return trainer, watch.seen


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in module.parameters()])


def wrapped(callback: Compile, net: nn.Module, beats: heartbeat.Heartbeat | None = None) -> nn.Module:
    trainer: Any = SimpleNamespace(
        recipe=None, device=torch.device("cpu"), heartbeat=beats or heartbeat.Heartbeat(), world=1, undo=ExitStack()
    )
    with trainer.undo:
        callback.wrap_model(trainer, net)
    return net


class Two(Toy):
    """Blocks of two widths, and one with a function of ours as its forward."""

    def model(self) -> nn.Module:
        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(16, 16)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x).tanh()

        narrow = [Block(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        wide = [Block(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(2)]
        return Net(nn.Linear(8, 16), nn.ModuleList([*narrow, *wide, Own()]), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("recipe", "knobs", "graphs", "recomputed"),
    [
        (Toy, {}, 1, False),
        pytest.param(Two, {}, 3, True, marks=pytest.mark.slow),
        pytest.param(Two, {"whole": True}, 1, True, marks=pytest.mark.slow),
    ],
)
def test_each_kind_of_block_has_a_graph_for_training_and_one_for_each_shape_of_evaluation(
    recipe, knobs, graphs, recomputed
):
    others: dict[str, Callback] = {"activation_checkpoint": ActivationCheckpoint()} if recomputed else {}
    knobs = {**knobs, "backend": "aot_eager" if recomputed else "eager", "max_recompiles": 1}  # of validation
    _, seen = train(recipe(), knobs, others)
    assert seen == [{"compile/graphs": graphs, "compile/recompiles": 0}] * 3
    # Validation came after the last step's metrics.
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 3 * graphs
    assert not dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("precision", "whole", "dropout"),
    quick([("fp32", True, 0.1), ("fp32", False, 0.1), ("bf16", False, 0), ("bf16_params", False, 0)]),
)
def test_aot_eager_has_eagers_bits_with_recomputation(precision, whole, dropout):
    """In bf16 with dropout, torch rounds the gradient at another place."""
    results = []
    ac: dict[str, Callback] = {"activation_checkpoint": ActivationCheckpoint()}
    for knobs, others in ((None, {}), ({"whole": whole, "backend": "aot_eager"}, ac)):
        masters = precision != "bf16_params"  # else steps round stochastically
        trainer, _ = train(Toy(dropout=dropout), knobs, others, precision=precision, master_weights=masters)
        results.append((weights(trainer.module), trainer.validation))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


class Sized(Toy):
    """The n-th training loss is that of fewer samples."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(depth=2)
        self.sizes = sizes

    def loss(self, model: nn.Module, batch) -> Tensor:
        if model.training:
            size = self.sizes.pop(0)
            batch = {name: tensor[:size] for name, tensor in batch.items()}
        return super().loss(model, batch)


@pytest.mark.slow
def test_recompilations_are_counted_in_metrics_and_log(capsys):
    _, seen = train(Sized([12, 12, 11, 10, 11]), {"max_recompiles": 2}, max_steps=4)  # the first is the rehearsal's
    assert [each["compile/graphs"] for each in seen] == [1, 2, 3, 3]
    assert [each["compile/recompiles"] for each in seen] == [0, 1, 2, 2]
    out = capsys.readouterr().out
    assert out.count("compile: Block compiled again in") == 3  # the last is validation's
    assert "for inputs of [11, 16]; recompilation 1 of at most 2" in out
    assert "for inputs of [10, 16]; recompilation 2 of at most 2" in out


@pytest.mark.parametrize(("most", "steps"), [(0, 2), (1, 3)])
def test_more_recompilations_than_allowed_end_the_run(most, steps):
    recipe = Sized([12, 12, 11, 10, 9])
    watch = Watch()
    trainer = make(recipe, {"compile": Compile(backend="eager", max_recompiles=most), "watch": watch}, max_steps=9)
    message = (
        rf"compile\.max_recompiles={most}: Block was to be compiled once more, for inputs of \[{12 - steps + 1}, 16\]"
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit()
    assert trainer.step == steps
    assert dynamo.utils.counters["stats"]["unique_graphs"] == most + 2


@pytest.mark.slow
def test_torchs_own_limit_does_not_turn_blocks_eager():
    """Beyond 8 graphs torch would run them eagerly, in silence."""
    _, seen = train(Sized([12, *range(12, 0, -1)]), {"max_recompiles": 20}, max_steps=12)
    assert seen[-1] == {"compile/graphs": 12, "compile/recompiles": 11}
    assert dynamo.config.recompile_limit == 8 and dynamo.config.optimize_ddp is True  # as before


@pytest.mark.slow
def test_names_of_parameters_and_identity_stay_and_a_checkpoint_loads_uncompiled():
    compiled, _ = train(knobs={"backend": "aot_eager"}, max_steps=2)
    assert list(compiled.module.state_dict()) == list(Toy(depth=3).model().state_dict())
    plain, _ = train(resume=str(compiled.checkpoint), accept=["callbacks"], max_steps=4, run_dir="runs/plain")
    straight, _ = train(max_steps=4, run_dir="runs/straight")
    assert torch.equal(weights(plain.module), weights(straight.module))  # aot_eager has eager's bits
    middle = "ckpt/straight/step-00000002"
    back, _ = train(
        knobs={"backend": "aot_eager"}, resume=middle, accept=["callbacks"], max_steps=4, run_dir="runs/back"
    )
    assert torch.equal(weights(back.module), weights(straight.module))


def test_a_copy_has_its_own_weights():
    net = wrapped(Compile(backend="eager"), Toy().model())
    x = torch.ones(2, 8)
    before = net(x)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not other(x).any() and torch.equal(net(x), before)


def test_the_average_of_the_weights_is_validated_with_its_own():
    compiled = {"backend": "aot_eager"}
    both = [train(knobs=knobs, others={"ema": EMA(0.5)})[0] for knobs in (None, compiled)]
    assert both[0].validation == both[1].validation
    assert torch.equal(*(weights(trainer.eval_model) for trainer in both))
    assert not torch.equal(weights(both[0].eval_model), weights(both[0].module))


class Uncalled(Toy):
    """A model that calls the function of its blocks, not the blocks."""

    def model(self) -> nn.Module:
        class Direct(Net):
            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                    x = block.forward(self.first(x))[:, :8]
                return self.last(self.first(x))

        net = super().model()
        return Direct(net.first, net.blocks, net.last)  # pyright: ignore[reportArgumentType]


def test_a_run_that_compiles_nothing_is_refused_before_the_first_step():
    trainer = make(Uncalled(), {"compile": Compile(backend="eager")})
    with refuses("callbacks.compile", "whole=true"):
        trainer.fit()
    assert trainer.step == 0


class Broken(Toy):
    """Blocks that torch can't trace in one piece."""

    def model(self) -> nn.Module:
        class Printing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(16, 16)

            def forward(self, x: Tensor) -> Tensor:
                x = self.linear(x)
                dynamo.graph_break()
                return x.tanh()

        return Net(nn.Linear(8, 16), nn.ModuleList([Printing(), Printing()]), nn.Linear(16, 4))


@pytest.mark.slow
def test_graph_breaks_are_told(capsys):
    _, seen = train(Broken(), {})
    assert seen[-1]["compile/recompiles"] == 0 and seen[-1]["compile/graphs"] == 2
    assert "compile: 1 graph break(s), which cut blocks into parts; the first: " in capsys.readouterr().out


def on_ranks(place: Place, whole: bool, recomputed: bool) -> Any:
    dynamo.reset()
    dynamo.utils.counters.clear()
    results = []
    for knobs in (None, {"whole": whole}):
        others: dict[str, Callback] = {"bucket": Bucket(mib=0.001)}  # DDPOptimizer would make a graph for each
        if recomputed:
            others["activation_checkpoint"] = ActivationCheckpoint()
        run = f"{whole}-{recomputed}-{knobs is None}"
        trainer, seen = train(
            knobs=knobs,
            others=others,
            place=Place(**{**vars(place), "store": f"{place.store}-{run}"}),
            run_dir=f"runs/{run}",
        )
        results.append((weights(trainer.module).numpy(), seen[-1]))
    return results


@pytest.mark.parametrize(
    ("whole", "recomputed"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_on_three_ranks_ddp_cuts_no_graph_and_the_numbers_are_eagers(whole, recomputed):
    """Gradients come in another order, so buckets differ, and gloo's order of summation with them."""
    for plain, compiled in run_ranks(WORLD, on_ranks, whole, recomputed):
        assert np.allclose(plain[0], compiled[0], rtol=0, atol=1e-6)
        assert compiled[1] == {"compile/graphs": 1, "compile/recompiles": 0}


def note_patience(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Compiles nothing; notes the step at which the rank began, and the heartbeat's extra seconds."""
    beat = heartbeat.last(Path(os.environ["ECHELON_HEARTBEAT"]))
    assert beat is not None
    PATIENCE.append((beat.began, beat.until - time.monotonic()))
    return graph.forward


def be_slow(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    time.sleep(1.0)
    return graph.forward


PATIENCE: list[tuple[int, float]] = []


def register(backend: Any) -> str:
    if backend.__name__ not in dynamo.list_backends(()):
        dynamo.register_backend(backend)
    return backend.__name__


def test_a_compilation_announces_itself_in_the_rehearsal_and_later(monkeypatch, tmp_path):
    PATIENCE.clear()
    monkeypatch.setenv("ECHELON_HEARTBEAT", str(tmp_path / "beat"))
    train(knobs={"backend": register(note_patience)})
    assert [began for began, _ in PATIENCE] == [-1, 0, 0]  # the rehearsal's, and two of validation
    assert all(1700 < patience <= 1800 for _, patience in PATIENCE)


@pytest.mark.slow
def test_a_rank_that_compiles_longer_than_a_rank_may_be_still_is_not_still():
    beats, still = heartbeat.Heartbeat(), []
    net = wrapped(Compile(backend=register(be_slow)), Toy().model(), beats)
    net(torch.ones(3, 8))  # Dynamo is loaded before the watch begins
    beats.watch(1.2, lambda: still.append(time.monotonic()))  # after half of it
    beats.beat(1)
    net(torch.ones(2, 8))
    assert not still
    beats.beat(2)
    time.sleep(1.2)
    beats.close()
    assert still


LIMIT_S = 1.5


def be_late(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Takes longer than the limit of a collective, where the rank says so."""
    if torch.is_grad_enabled() in LATE:
        time.sleep(3 * LIMIT_S)
    return graph.forward


LATE: list[bool] = []


def with_a_late_rank(place: Place, training: bool) -> tuple[Any, str]:
    """Compiles for long on one rank: a graph for training, or one for evaluation."""
    dynamo.reset()
    LATE[:] = [training] if place.rank == 2 else []
    others: dict[str, Callback] = {"bucket": Bucket(mib=0.001)}
    run = {"place": place, "run_dir": "runs/late", "timeout_s": LIMIT_S, "max_steps": 2}
    try:
        found = weights(train(Normed(), {"backend": register(be_late)}, others, **run)[0].module).numpy()
    except RuntimeError:
        found = None
    return found, Path(f"runs/late/logs/rank{place.rank}.log").read_text()


class Normed(Toy):
    """With buffers, which DDP shares before each pass."""

    def model(self) -> nn.Module:
        net = super().model()
        net.add_module("first", nn.Sequential(net.get_submodule("first"), nn.BatchNorm1d(self.width)))
        return net


@pytest.mark.slow
def test_ranks_wait_in_the_rehearsal_for_one_that_compiles_longer_than_a_collective_may_take():
    plain = run_ranks(WORLD, on_three, None)
    for (found, log), expected in zip(run_ranks(WORLD, with_a_late_rank, True), plain, strict=True):
        assert found is not None and "raise it" not in log
        assert np.allclose(found, expected, rtol=0, atol=1e-6)


def on_three(place: Place, knobs: dict[str, Any] | None) -> Any:
    others: dict[str, Callback] = {"bucket": Bucket(mib=0.001)}
    return weights(train(Normed(), knobs, others, place=place, max_steps=2)[0].module).numpy()


@pytest.mark.slow
def test_a_rank_that_compiles_for_long_after_the_rehearsal_names_the_limit_before_the_others_give_up():
    ranks = run_ranks(WORLD, with_a_late_rank, False)
    said = "WARNING compile: Block has compiled for 0.75 s, and other ranks wait for trainer.timeout_s=1.5 at most"
    assert [found for found, _ in ranks] == [None] * WORLD
    assert [said in log for _, log in ranks] == [False, False, True]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_recompiles": -1}, r"callbacks\.compile\.max_recompiles=-1: must be at least 0"),
        (
            {"whole": True, "blocks": ["Block"]},
            r"compile\.whole=true: .* blocks=\[Block\] has no effect; leave",
        ),
        ({"mode": "reduce-overhead"}, r"compile\.mode=reduce-overhead: .*CUDA graphs.*max-autotune-no-cudagraphs"),
        ({"backend": "eager", "mode": "default"}, r"compile\.mode=default: backend=eager has no such setting"),
        ({"backend": "eager", "fallback_random": True}, r"compile\.fallback_random=true: backend=eager has no"),
        ({"backend": "inductr"}, r"compile\.backend=inductr: is not a backend; did you mean inductor"),
        ({"backend": "eager", "blocks": ["Blok"]}, r"callbacks\.compile\.blocks=\[Blok\]: no Blok in this model"),
    ],
)
def test_bad_knobs_are_refused_before_the_first_step(knobs, message):
    before = dynamo.config.optimize_ddp
    with pytest.raises(ConfigError, match=message):
        make(callbacks={"compile": Compile(**knobs)})
    assert dynamo.config.optimize_ddp == before


class Refuses(Callback):
    def wrap_optimizer(self, trainer, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        raise ConfigError("refused on purpose")


def test_torchs_settings_come_back_after_the_run_and_after_a_refusal():
    before, seen = dynamo.config.recompile_limit, []
    with pytest.raises(ConfigError, match="refused on purpose"):
        make(callbacks={"compile": Compile(backend="eager"), "refuses": Refuses()})
    assert dynamo.config.recompile_limit == before
    watch = type(
        "Looks", (Callback,), {"on_step_end": lambda self, trainer: seen.append(dynamo.config.recompile_limit)}
    )
    train(Toy(depth=3), {}, {"looks": watch()})
    assert min(seen) > before and dynamo.config.recompile_limit == before


def test_a_backend_that_recomputes_with_other_random_numbers_is_refused_with_recomputation():
    with refuses("compile and activation_checkpoint can't run together", "backend=eager", "backend=inductor"):
        make(callbacks={"compile": Compile(backend="eager"), "activation_checkpoint": ActivationCheckpoint()})


@pytest.mark.parametrize("named", [False, True])
def test_a_noexec_folder_for_compiled_code_is_refused_in_one_line(named, monkeypatch, tmp_path):
    mounted = {tmp_path: os.ST_NOEXEC | os.ST_NOSUID}
    monkeypatch.setattr(os, "statvfs", lambda path: mock.Mock(f_flag=mounted.get(path, 0)))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if named:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "b"))
    folder = re.escape(str(tmp_path / "a" / "b" if named else tmp_path))
    with pytest.raises(ConfigError, match=rf"backend=inductor: {folder} is mounted noexec, .*set TORCHINDUCTOR_CACHE_"):
        refuse_missing_tools(torch.device("cpu"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path.parent))
    refuse_missing_tools(torch.device("cpu"))


def test_inductor_without_a_compiler_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with refuses("callbacks.compile.backend=inductor", "/nowhere/g++", "CXX"):
        make(callbacks={"compile": Compile()})
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"found no working C\+\+ compiler \(g\+\+\)"):
        make(callbacks={"compile": Compile()})


def test_inductor_without_pythons_headers_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with refuses("callbacks.compile.backend=inductor", "headers"):
        make(callbacks={"compile": Compile()})


SLOW = Toy(samples=48, width=32, depth=3, dropout=0.1)


def with_inductor(place: Place, folder: Path) -> Any:
    """Returns of each run the weights and the counts."""
    path = f"{folder}:{os.environ['PATH']}"
    with mock.patch.dict(os.environ, {"PATH": path, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}):
        return run_all(place)


def run_all(place: Place) -> dict[str, Any]:
    runs: dict[str, dict[str, Any]] = {
        "plain": {},
        "compiled": {"knobs": {"backend": "inductor"}},
        "resumed": {"knobs": {"backend": "inductor"}, "resume": "ckpt/compiled/step-00000002"},
        "fallback": {"knobs": {"backend": "inductor", "fallback_random": True}},
        "tuned": {"knobs": {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}},
        "recomputed": {
            "knobs": {"backend": "inductor", "fallback_random": True},
            "others": {"activation_checkpoint": ActivationCheckpoint()},
        },
    }
    results = {}
    for run, arguments in runs.items():
        dynamo.reset()
        own = replace(place, store=f"{place.store}-{run}")
        trainer, seen = train(SLOW, place=own, run_dir=f"runs/{run}", max_steps=4, **arguments)
        results[run] = weights(trainer.module).numpy(), seen[-1]
    return results


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_inductor_on_three_ranks(tmp_path):
    """A resume is bitwise, numbers are eager's to rounding with eager's random numbers, and g++ runs once a kernel."""
    calls, compiler = tmp_path / "calls", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    ranks = run_ranks(WORLD, with_inductor, tmp_path, timeout_s=480)
    for rank in ranks:
        bits, plain = {run: result[0] for run, result in rank.items()}, rank["plain"][0]
        assert np.array_equal(bits["compiled"], bits["resumed"])
        assert np.abs(bits["compiled"] - plain).max() > 1e-3  # other numbers for dropout
        for run in ("fallback", "recomputed"):
            assert 0 < np.abs(bits[run] - plain).max() < 1e-6
        graphs = [counts for run, (_, counts) in rank.items() if run != "plain"]
        assert graphs == [{"compile/graphs": 1, "compile/recompiles": 0}] * len(graphs)
    sources = [line.split()[0] for line in calls.read_text().splitlines() if ".main.cpp" in line]
    assert len(sources) == len(set(sources)) > 2  # a lock on the kernel's file: the other ranks load it


def test_a_model_without_blocks_is_compiled_whole(tmp_path):
    class Plain(Toy):
        def model(self):
            return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(self.dtype)

    compiled = Compile(backend="eager")
    assert make(Plain(), {"compile": compiled}, max_steps=2).fit()["steps"] == 2
    assert compiled.whole and [counter.name for counter in compiled.counters] == ["Sequential"]


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_variable_that_turns_compilation_off_is_named(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"callbacks.compile: {name}=1 turns torch.compile off; unset it, or leave"):
        Compile()
