"""Number formats: what is really computed in them, and what an overflow in fp16 does."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from support.cli import environment
from torch import nn
from toy_recipe import Toy

from trainer import main as command
from trainer.callback import Callback
from trainer.callbacks.overlap.callback import Overlap
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import ConfigError
from trainer.precision import Precision
from trainer.process.environment import Place
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
def test_hidden_activations_have_the_type_and_weights_stay_float32(precision, hidden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, watch = train(Toy(), precision, 1)
    assert watch.types == {hidden}  # training's and validation's
    assert trainer.precision.name == ("fp32" if precision == "auto" else precision)
    assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}
    assert trainer.scaler.is_enabled() == (precision == "fp16")


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
    with pytest.raises(ConfigError, match=r"trainer\.precision=tf32: cpu has no TF32; use trainer\.precision=auto"):
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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Precision, "__init__", lambda self, name, *_: setattr(self, "name", "fp16"))
    with pytest.raises(ConfigError, match="overlap and fp16 can't run together"):
        Trainer(Toy(), {"overlap": Overlap()}, batch=12, options=Options(precision="auto"), place=Place())


def test_deterministic_is_refused_where_cublas_may_have_been_used(monkeypatch):
    """cuBLAS has read its variable by then: the first deterministic operation would raise."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": device})
    with pytest.raises(ConfigError, match=r"trainer\.deterministic=true: .*CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        Precision("fp32", torch.device("cuda"), True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_command_sets_what_cublas_reads_once_before_any_rank_starts(monkeypatch):
    """Also of a job of -m that is not deterministic: the next one may be, in the same process."""
    seen = []
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"})
    monkeypatch.setattr("trainer.launch.launcher.start", lambda *_: seen.append(os.environ["CUBLAS_WORKSPACE_CONFIG"]))
    command.run(
        {"trainer": {"devices": 1}, "nccl": {}, "batch": 12, "micro_batch": None, "accumulate": None}, "toy", []
    )
    assert seen == [":4096:8"]


def test_deterministic_is_all_that_torch_has_for_it():
    code = (
        "import os, sys, torch; from trainer.trainer import Precision\n"
        "torch.backends.cudnn.benchmark = True\n"
        "def tell(): print(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,\n"
        "                  os.environ.get('CUBLAS_WORKSPACE_CONFIG'), torch.empty(99).isnan().all().item())\n"
        "Precision('fp32', torch.device('cpu'), deterministic=True), tell()\n"
        "Precision('fp32', torch.device('cuda'), deterministic=True), tell()\n"
        "import torch._inductor.config as inductor; print(inductor.deterministic)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["False True None False", "True False :4096:8 False", "True"]
