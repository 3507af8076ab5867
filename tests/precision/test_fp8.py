"""Linear layers in FP8: which of them, the numbers by hand, and runs that emulate FP8 on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from support.sharded import Case, fit
from support.sharded import run as run_case
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.callbacks.ema import EMA
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.errors import ConfigError
from trainer.precision import Precision, fp8
from trainer.precision.fp8 import compute_in_fp8, refuse_without_fp8
from trainer.process.environment import Place

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CLOSE = 0.02  # of losses around 0.1 to 0.5: FP8 has 3 bits after the first one


@contextmanager
def emulated() -> Iterator[None]:
    """Lets a CPU pass for a device with FP8: products are of numbers that were rounded to FP8, in float32."""
    from torchao.float8 import Float8LinearConfig

    config = partial(Float8LinearConfig, emulate=True)
    with (
        mock.patch("torchao.float8.Float8LinearConfig", config),
        mock.patch("trainer.precision.formats.refuse_without_fp8", lambda device: None),
    ):
        yield


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Model(nn.Module):
    """With layers of each kind, and a head that the model names, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.narrow, self.odd, self.hooked = nn.Linear(16, 20), Odd(16, 16), nn.Linear(16, 16)
        self.tied, self.head = nn.Linear(16, 32, bias=False), nn.Linear(16, 48)
        self.tied.weight = self.embedding.weight
        self.hooked.register_forward_hook(lambda module, args, output: output * 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.hooked(self.odd(x))


def test_hidden_layers_with_sizes_that_are_multiples_of_16_are_converted_and_the_rest_is_counted(caplog):
    model = Model()
    before, state = dict(model.named_parameters(remove_duplicate=False)), torch.get_rng_state()
    with emulated(), mock.patch.object(fp8.log, "propagate", True), caplog.at_level("INFO", "echelon"):
        assert compute_in_fp8(model) is model
    converted = [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]
    assert converted == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    assert torch.equal(torch.get_rng_state(), state)
    assert "precision: 4 of 9 linear layers compute in fp8; others: " in caplog.text
    for words in ("1 with sizes that are no multiples of 16", "2 with code of", "2 at the output or tied to an"):
        assert words in caplog.text


def test_a_model_without_such_layers_is_refused():
    with refuses("trainer.precision=fp8", "FP8", "trainer.precision=bf16"):
        compute_in_fp8(nn.Sequential(nn.Linear(8, 16), nn.Tanh()))


def rounded(value: Tensor, kind: torch.dtype) -> Tensor:
    """By hand: the largest value becomes the type's largest, and one scale serves the tensor."""
    scale = torch.finfo(kind).max / value.abs().max().double()
    return (value.double() * scale).float().to(kind).double() / scale


@pytest.mark.parametrize("tokens", [32, 7])
def test_products_are_of_numbers_rounded_to_fp8_forward_and_backward(tokens):
    torch.manual_seed(0)
    plain = nn.Linear(16, 32)
    x, g = torch.randn(tokens, 16, requires_grad=True), torch.randn(tokens, 32)
    with emulated():
        layer: Any = compute_in_fp8(nn.Sequential(plain))
    layer(x).backward(g)
    assert layer[0].linear_mm_config.grad_weight.pad_inner_dim  # a GPU takes tokens in multiples of 16 alone
    w, e4m3, e5m2 = plain.weight.detach(), torch.float8_e4m3fn, torch.float8_e5m2
    output = rounded(x.detach(), e4m3) @ rounded(w, e4m3).T + plain.bias.detach().double()
    torch.testing.assert_close(layer(x).double(), output, rtol=1e-5, atol=1e-5)
    assert x.grad is not None and plain.weight.grad is not None
    torch.testing.assert_close(x.grad.double(), rounded(g, e5m2) @ rounded(w, e4m3), rtol=1e-5, atol=1e-5)
    by_hand = rounded(g, e5m2).T @ rounded(x.detach(), e4m3)
    torch.testing.assert_close(plain.weight.grad.double(), by_hand, rtol=1e-5, atol=1e-5)
    assert (output - plain(x).double()).abs().max() > 1e-3  # of FP8, indeed


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_device_without_fp8_is_refused(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    message = rf"precision=fp8: {device} has no FP8, which needs a GPU of compute capability 8\.9 or later; use trainer"
    with pytest.raises(ConfigError, match=message):
        Precision("fp8", device)


def test_torchao_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    refuse_without_fp8(CUDA)
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    with refuses("trainer.precision=fp8", "'torchao>=0.18,<0.19'"):
        refuse_without_fp8(CUDA)


def case(run: str, precision: str = "fp8", callbacks: dict[str, Callback] | None = None, **options: Any) -> Case:
    recipe = Toy(width=32, depth=3)
    options |= {"precision": precision, "clip_norm": None, "check_replicas_every": 1}
    return Case(callbacks or {}, options, recipe=recipe, steps=6, run=run)


CALLBACKS: dict[str, dict[str, Callback]] = {
    "ema": {"ema": EMA(0.0)},  # the last weights, in a copy of the model
    "recomputed": {"activation_checkpoint": ActivationCheckpoint()},
    "selective": {"activation_checkpoint": ActivationCheckpoint(policy="selective")},
    "owned": {"shard": Shard(2)},
    "rows": {"shard": Shard(3)},
    "compiled": {"compile": Compile(backend="aot_eager")},
}
CASES = [
    case("bf16", "bf16"),
    case("fp8"),
    case("resumed", resume="ckpt/fp8/step-00000003"),
    case("other", "fp32", resume="ckpt/fp8/step-00000003"),
    case("back", resume="ckpt/bf16/step-00000003"),
    *(case(name, callbacks=callbacks) for name, callbacks in CALLBACKS.items()),
]


def runs(place: Place, cases: list[Case]) -> dict[str, dict[str, Any]]:
    with emulated():
        return {each.run: found for each, found in zip(cases, fit(place, cases), strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_are_close_to_bf16_resume_with_the_same_bits_and_compose(tmp_path):
    ranks = run_ranks(3, runs, CASES)
    for found in ranks:
        refused = {run: each["refused"] for run, each in found.items() if "refused" in each}
        assert not refused
        bf16, fp8 = found["bf16"], found["fp8"]
        assert 0 < np.abs(np.subtract(bf16["losses"], fp8["losses"])).max() < CLOSE
        np.testing.assert_array_equal(fp8["weights"], found["resumed"]["weights"])
        assert fp8["losses"][3:] == found["resumed"]["losses"] and fp8["validation"] == found["resumed"]["validation"]
        # A checkpoint has no precision.
        assert np.abs(np.subtract(found["other"]["losses"], fp8["losses"][3:])).max() < CLOSE
        assert np.abs(np.subtract(found["back"]["losses"], bf16["losses"][3:])).max() < CLOSE
        for run in CALLBACKS:
            bound = {"rows": 1e-3, "compiled": 1e-3}.get(run, 0)  # another order of summation, then another bit of FP8
            assert np.abs(found[run]["weights"] - fp8["weights"]).max() <= bound, run
        for run, each in found.items():
            np.testing.assert_array_equal(each["weights"][:2000], ranks[0][run]["weights"][:2000], err_msg=run)


def staged(place: Place) -> str:
    with emulated():
        callbacks: dict[str, Callback] = {"pipeline": PipelineParallel(stages=3)}
        return run_case(replace(place), case("staged", callbacks=callbacks))["refused"]


def test_a_pipeline_is_refused(tmp_path):
    for refused in run_ranks(3, staged):
        assert "pipeline and fp8 can't run together: a stage's loss is compared with the whole model's" in refused
