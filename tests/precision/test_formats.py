"""Number formats: what is really computed in them, and what an overflow in fp16 does."""

import copy
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.cli import environment
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from support.runs import sgd
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_recipe import Net, Toy

from trainer import main as command
from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.callbacks.ema import EMA
from trainer.callbacks.overlap.callback import Overlap
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.precision import formats as number_formats
from trainer.precision.formats import DTYPES, Precision
from trainer.process.environment import Place
from trainer.rng import GOLDEN, MASK
from trainer.trainer import Trainer

CPU = torch.device("cpu")


class Watch(Callback):
    """The type of each hidden activation, and weights and loss scale after each step."""

    def __init__(self) -> None:
        self.types: set[torch.dtype] = set()
        self.weights: list[torch.Tensor] = []
        self.scales: list[float] = []

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        model.get_submodule("first").register_forward_hook(lambda _m, _a, output: self.types.add(output.dtype))
        return model

    def on_fit_start(self, trainer) -> None:
        self.on_step_end(trainer)

    def on_step_end(self, trainer) -> None:
        self.weights.append(torch.cat([p.detach().flatten() for p in trainer.module.parameters()]))
        self.scales.append(trainer.scaler.get_scale())


class Overflowing(Toy):
    """Its second training loss has gradients that fp16 can't hold; the others are far below."""

    calls = 0

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        self.calls += model.training
        return super().loss(model, batch) * (1e30 if self.calls == 2 else 2**-8)


def train(recipe: Toy, precision: str, steps: int, resume: str | None = None) -> tuple[Trainer, Watch]:
    watch = Watch()
    trainer = Trainer(
        recipe,
        {"watch": watch},
        batch=12,
        options=Options(
            max_steps=steps, precision=precision, run_dir=f"runs/{precision}-{steps}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=None),
        ),
        data=DataOptions(workers=0),
        place=Place(),
    )  # fmt: skip
    trainer.fit()
    return trainer, watch


@pytest.mark.parametrize(
    ("precision", "hidden"),
    [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_hidden_activations_have_the_type_and_weights_stay_float32(precision, hidden, tmp_path):
    trainer, watch = train(Toy(), precision, 1)
    assert watch.types == {hidden}  # training's and validation's
    assert trainer.precision.name == ("fp32" if precision == "auto" else precision)
    assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}
    assert trainer.scaler.is_enabled() == (precision == "fp16")


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale(tmp_path):
    trainer, watch = train(Overflowing(), "fp16", 3)
    start, first, second, third = watch.weights
    assert not torch.equal(start, first)
    assert torch.equal(first, second)  # the step that overflowed
    assert not torch.equal(second, third)
    assert watch.scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    _, resumed = train(Toy(), "fp16", 4, str(trainer.checkpoint))
    assert resumed.scales[0] == 2.0**15
    assert torch.equal(resumed.weights[0], third)


def test_tf32_is_refused_where_there_is_none():
    with refuses("trainer.precision=tf32", "TF32", "trainer.precision=auto"):
        Precision("tf32", CPU)


def test_float32_means_float32():
    torch.set_float32_matmul_precision("high")
    Precision("fp32", CPU)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("has_bf16", "name"), [(True, "bf16"), (False, "fp16")])
def test_auto_on_a_gpu_asks_what_it_computes_in(has_bf16, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that there is no CUDA
        assert Precision("auto", torch.device("cuda", 0)).name == name


def test_fp16_that_auto_has_chosen_is_seen_by_conflicts(tmp_path, monkeypatch):
    monkeypatch.setattr(Precision, "__init__", lambda self, name, *_: setattr(self, "label", "fp16"))
    with refuses("overlap and fp16 can't run together", "trainer.precision=bf16"):
        Trainer(Toy(), {"overlap": Overlap()}, batch=12, options=Options(precision="auto"), place=Place())


def test_deterministic_is_refused_where_cublas_may_have_been_used(monkeypatch):
    """cuBLAS has read its variable by then: the first deterministic operation would raise."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": device})
    with refuses("trainer.deterministic=true", "CUBLAS_WORKSPACE_CONFIG", "4096", "8"):
        Precision("fp32", torch.device("cuda"), True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_command_sets_what_cublas_reads_once_before_any_rank_starts(monkeypatch):
    """Also of a job of -m that is not deterministic: the next one may be, in the same process."""
    seen = []
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"})
    monkeypatch.setattr("trainer.launch.launcher.start", lambda *_: seen.append(os.environ["CUBLAS_WORKSPACE_CONFIG"]))
    settings = {"batch": 12, "micro_batch": None, "accumulate": None, "callbacks": {}, "nccl": {}}
    command.run({"trainer": {"devices": 1}, **settings}, "toy", [])
    assert seen == [":4096:8"]


@pytest.mark.slow
def test_deterministic_is_all_that_torch_has_for_it():
    code = (
        "import os, sys, torch; from trainer.precision import Precision\n"
        "torch.backends.cudnn.benchmark = True\n"
        "def tell(): print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,\n"
        "                  os.environ.get('CUBLAS_WORKSPACE_CONFIG'), torch.empty(99).isnan().all().item())\n"
        "Precision('fp32', torch.device('cpu'), deterministic=True), tell()\n"
        "Precision('fp32', torch.device('cuda'), deterministic=True), tell()\n"
        "import torch._inductor.config as inductor; print(inductor.deterministic)"
    )
    env = {key: value for key, value in environment().items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["False True None False", "True False :4096:8 False", "True"]


class Normed(Toy):
    """Residual blocks with a LayerNorm; keeps the batches of training."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        assert not torch.is_autocast_enabled("cpu")
        if model.training:
            self.batches.append(batch)
        return super().loss(model, batch)

    def model(self) -> nn.Module:
        class Residual(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.q, self.k = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
                self.drop = nn.Dropout(0.1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.norm(x)
                return x + self.drop(self.q(y) * torch.tanh(self.k(y)))

        return Net(nn.Linear(8, 16), nn.ModuleList(Residual() for _ in range(3)), nn.Linear(16, 4))


class OwnFormat(Toy):
    """A loss under this rank's own autocast, for a run that has none."""

    def __init__(self, name: str) -> None:
        super().__init__(dropout=0.1)
        self.name = name

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        with torch.autocast("cpu", DTYPES.get(self.name, torch.bfloat16), enabled=self.name in DTYPES):
            return super().loss(model, batch)


class OverflowingThere(Overflowing):
    """Overflows on one rank, in the second step: the rehearsal has two passes, the first step two micro-batches."""

    def __init__(self, there: bool) -> None:
        super().__init__()
        self.calls = -4 if there else -1000


def on_a_rank(
    place: Place,
    names: list[str],
    run: str,
    recipe: Toy,
    precision: str = "auto",
    callbacks: dict[str, Callback] | None = None,
    **options: Any,
) -> tuple[Trainer, Watch]:
    """Trains 4 steps on a rank whose device computes in `names[rank]`."""
    watch, place = Watch(), replace(place, store=f"{place.store}-{run}")
    with mock.patch.object(number_formats, "fastest", lambda device: names[place.rank]):
        trainer = Trainer(
            recipe, {"watch": watch, **(callbacks or {})}, sgd, batch=24, accumulate=2, place=place,
            data=DataOptions(workers=0),
            options=Options(**{
                "max_steps": 4, "precision": precision, "run_dir": f"runs/{run}", "clip_norm": 1.0,
                "check_replicas_every": 1, "checkpoint": CheckpointOptions(every_steps=2), **options,
            }),
        )  # fmt: skip
        trainer.fit()
    return trainer, watch


def unequal(place: Place, names: list[str]) -> dict[str, Any]:
    trainer, watch = on_a_rank(place, names, "straight", Toy(dropout=0.1))
    _, resumed = on_a_rank(place, names, "resumed", Toy(dropout=0.1), resume="ckpt/straight/step-00000002")
    _, own = on_a_rank(place, names, "own", OwnFormat(names[place.rank]), "fp32")
    _, over = on_a_rank(place, names, "over", OverflowingThere(place.rank == 2))
    return {
        "label": trainer.precision.label,
        "types": {str(kind) for kind in watch.types},
        "scales": (watch.scales, resumed.scales, over.scales),
        "weights": [numpy(w) for w in (watch.weights[-1], resumed.weights[-1], own.weights[-1])],
        "over": [numpy(w) for w in over.weights],
        "validation": trainer.validation,
    }


def numpy(weights: torch.Tensor) -> Any:
    return weights.numpy()


@pytest.mark.parametrize("names", quick([["fp32", "bf16", "bf16"], ["bf16", "fp32", "fp16"]]), ids="+".join)
def test_each_rank_trains_in_its_own_format_and_all_have_the_same_weights(names, tmp_path):
    ranks = run_ranks(3, unequal, names)
    scaled, parts = "fp16" in names, {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
    for rank, result in enumerate(ranks):
        straight, resumed, own = result["weights"]
        assert result["types"] == {parts[names[rank]]}
        assert result["label"] == ("1 x bf16, 1 x fp32, 1 x fp16" if scaled else "1 x fp32, 2 x bf16")
        assert (straight == ranks[0]["weights"][0]).all() and (straight == resumed).all()
        difference = abs(straight - own).max()
        assert difference < 1e-3 if scaled else difference == 0
        assert result["validation"] == ranks[0]["validation"]
        one = 2.0**16 if scaled else 1.0
        assert result["scales"][:2] == ([one] * 5, [one] * 3)
    summary = json.loads(Path("runs/straight/summary.json").read_text())
    assert summary["precision"] == ranks[0]["label"]


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path):
    for result in run_ranks(3, unequal, ["bf16", "fp32", "fp16"]):
        start, first, second, third, _ = result["over"]
        assert (start != first).any() and (first == second).all() and (second != third).any()
        assert result["scales"][2] == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15]


def refused(place: Place) -> list[str]:
    said = []
    for run, names, callbacks, precision in (
        ("overlap", ["fp32", "fp32", "fp16"], {"overlap": Overlap()}, "auto"),
        ("settings", ["fp32"] * 3, {}, "bf16" if place.rank else "fp32"),
    ):
        with mock.patch.object(number_formats, "fastest", lambda device: names[place.rank]):  # noqa: B023
            with pytest.raises(ConfigError) as refusal:
                Trainer(
                    Toy(), callbacks, batch=12, options=Options(precision=precision), data=DataOptions(workers=0),
                    place=replace(place, store=f"{place.store}-{run}"),
                )  # fmt: skip
            said.append(str(refusal.value))
    return said


def test_a_conflict_with_fp16_is_refused_on_all_ranks_and_so_are_different_settings(tmp_path):
    for overlap, settings in run_ranks(3, refused):
        assert "overlap and fp16 can't run together" in overlap
        assert settings.startswith("trainer.precision is fp32 on rank 0 and bf16 on rank 1; start all ranks with")


def casts(precision: str) -> int:
    """Returns how many tensors of activations a forward and a backward pass cast."""
    torch.manual_seed(0)
    number, model = Precision(precision, CPU), Normed().model()
    number.convert(model)
    sizes = {p.numel() for p in model.parameters()}
    seen = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].numel() not in sizes:
                seen.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with Casts():
        number.cast(lambda: model(torch.randn(7, 8)).square().sum())().backward()
    return len(seen)


def test_in_bf16_params_nothing_but_inputs_and_outputs_is_cast():
    assert casts("fp32") == 0
    assert casts("bf16_params") == 3  # the input, the output, and the output's gradient


def test_bf16_params_are_masters_of_a_bf16_model(tmp_path):
    """A model of true bf16 parameters, with float32 copies that an optimizer steps, gives the same bits."""
    recipe = Normed()
    trainer, watch = on_a_rank(Place(), ["fp32"], "straight", recipe, "bf16_params", clip_norm=None)
    assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}
    torch.manual_seed(0)
    masters, batches = Normed().model(), iter(recipe.batches)
    optimizer, low = sgd(masters.parameters()), copy.deepcopy(masters).to(torch.bfloat16)
    pairs = list(zip(low.parameters(), masters.parameters(), strict=True))
    for step in range(4):
        torch.manual_seed((trainer.loop.seed_base + step * GOLDEN) & (MASK >> 1))
        micros = [next(batches), next(batches)]
        weights = [recipe.weight(batch) for batch in micros]
        for batch, weight in zip(micros, weights, strict=True):
            output = low(batch["x"].to(torch.bfloat16)).float()
            loss = ((output - batch["y"]).square() * batch["mask"]).sum() / batch["mask"].sum()
            (loss / (sum(weights) / weight)).backward()
            for p, master in pairs:
                master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for p, master in pairs:
            p.data.copy_(master.data)
        assert torch.equal(watch.weights[step + 1], torch.cat([p.detach().flatten() for p in masters.parameters()]))
    assert watch.types == {torch.bfloat16}


def bf16_params(place: Place) -> dict[str, Any]:
    made: dict[str, Any] = {
        "straight": {},
        "resumed": {"resume": "ckpt/straight/step-00000002"},
        "recomputed": {"callbacks": {"activation_checkpoint": ActivationCheckpoint()}},
        "compiled": {"callbacks": {"compile": Compile(backend="eager")}},
        "averaged": {"callbacks": {"ema": EMA(0.0)}},  # the last weights, in a copy of the model
    }
    results = {}
    for run, arguments in made.items():
        trainer, watch = on_a_rank(place, ["fp32"] * 3, run, Normed(), "bf16_params", **arguments)
        results[run] = watch.weights[-1].numpy(), trainer.validation["val/loss"]
    other, _ = on_a_rank(
        place, ["fp32"] * 3, "other", Normed(), "fp32", resume="ckpt/straight/step-00000004", max_steps=5
    )
    return results | {"other": other.step}


@pytest.mark.slow
def test_bf16_params_resume_and_compose_on_three_ranks(tmp_path):
    for rank in run_ranks(3, bf16_params):
        assert rank.pop("other") == 5  # a run in another precision takes the checkpoint
        straight, loss = rank.pop("straight")
        for run, (weights, validated) in rank.items():
            bound = 1e-3 if run == "compiled" else 0  # another order of summation in DDP, and then another bit of bf16
            assert abs(weights - straight).max() <= bound and abs(validated - loss) <= bound, run


def test_an_rnn_is_refused_in_bf16_params():
    net = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))
    with refuses("trainer.precision=bf16_params", "GRU", "trainer.precision=bf16"):
        Precision("bf16_params", CPU).convert(net)


@pytest.mark.parametrize("name", ["bf16_params", "fp32"])
def test_a_model_is_converted_for_a_while(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    kinds, x = [type(module) for module in model.modules()], torch.randn(2, 3)
    with pytest.raises(ValueError, match="on purpose"), Precision(name, CPU).converted(model):
        inside = model(x)
        raise ValueError("on purpose")
    assert torch.equal(inside, Precision(name, CPU).convert(copy.deepcopy(model))(x))
    assert [type(module) for module in model.modules()] == kinds
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert torch.equal(inside, model(x)) == (name == "fp32")


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_stays_in_float32_in_bf16_params(kind, affine):
    """Its inputs and outputs are bf16; its statistics are those of these inputs, in float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), kind(4, affine=affine), nn.Linear(4, 4))
    alone = nn.BatchNorm1d(4, affine=affine)
    seen = []
    net[1].register_forward_hook(lambda module, args, out: seen.append((args[0].detach(), out.detach())))
    net = Precision("bf16_params", CPU).convert(net)
    net(torch.randn(8, 4)).square().sum().backward()
    assert seen[0][0].dtype == torch.bfloat16 and torch.equal(seen[0][1], alone(seen[0][0]))
    for name, value in alone.state_dict().items():
        assert torch.equal(net[1].state_dict()[name], value)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
    net.eval()(torch.randn(8, 4))
    assert torch.equal(seen[1][1], alone.eval()(seen[1][0]))
