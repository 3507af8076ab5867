"""Each kind of cell in miniature, on the CPU: its numbers exist and agree with each other."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.messages import refuses
from support.needs import needs

from scripts.bench.harness import Failed, missing
from scripts.bench.one_gpu import measure as bench
from scripts.bench.one_gpu.cells import TINY, Cell
from scripts.bench.one_gpu.measure import KERNELS, changes, kind_of
from scripts.bench.trainers import PACKAGES
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.errors import ConfigError

pytestmark = needs("transformers")
LOOPS = ("Echelon", *bench.LOOPS)
CELL = Cell("speed", "Echelon", 16, 2, size=TINY, backend="aot_eager", warm=2, timed=3)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    variables = dict(os.environ)
    yield
    for name in os.environ.keys() - variables.keys():  # other trainers set some
        del os.environ[name]


@pytest.mark.parametrize("trainer", LOOPS)
def test_a_trainer_makes_the_steps_and_no_more(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, clocks = replace(CELL, trainer=trainer), list[bench.Clock]()
    if reason := missing(PACKAGES.get(trainer, ())):
        pytest.skip(reason)

    class Kept(bench.Clock):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            clocks.append(self)

    monkeypatch.setattr(bench, "Clock", Kept)
    found = bench.measure(cell, tmp_path)
    assert found.keys() == {"ms a step", "tokens/s", "peak GiB"} and min(found.values()) > 0
    assert found["tokens/s"] * found["ms a step"] == pytest.approx(1000 * 2 * 16)
    assert clocks[0].steps == CELL.warm + CELL.timed


def test_all_trainers_begin_with_the_same_weights() -> None:
    weights = {}
    for trainer in LOOPS:
        cell = replace(CELL, trainer=trainer)
        if not missing(PACKAGES.get(trainer, ())):
            torch.manual_seed(0)
            weights[trainer] = sum(p.double().sum().item() for p in bench.RandomText(cell).model().parameters())
    assert len(set(weights.values())) == 1 and len(weights) >= 2


@pytest.mark.slow
def test_recompute_and_compile_reach_the_trainer(tmp_path: Path) -> None:
    found = changes(replace(CELL, recompute="budget=0.5", compiled="whole"))
    checkpoint, compiled = found["activation_checkpoint"], found["compile"]
    assert isinstance(checkpoint, ActivationCheckpoint) and checkpoint.budget == 0.5
    assert isinstance(compiled, Compile) and compiled.whole and compiled.backend == "aot_eager"
    assert bench.measure(replace(CELL, recompute="full", compiled="blocks"), tmp_path)["tokens/s"] > 0
    with pytest.raises(ConfigError, match="policy"):
        bench.measure(replace(CELL, recompute="half"), tmp_path / "half")


def test_an_unknown_precision_is_refused_and_not_taken_for_fp32(tmp_path: Path) -> None:
    with refuses("trainer.precision=fp5", "auto"):
        bench.measure(replace(CELL, precision="fp5"), tmp_path)


def test_a_checkpoint_is_timed_until_it_is_written(tmp_path: Path) -> None:
    found = bench.measure(replace(CELL, kind="snapshot"), tmp_path)
    assert found["steps until written"] >= 1 and found["ms a step"] > 0
    parameters = sum(p.numel() for p in bench.RandomText(CELL).model().parameters())
    assert found["GiB"] * 2**30 == pytest.approx(12 * parameters, rel=0.1)  # weights and two moments


def test_kinds_of_kernels_add_up(tmp_path: Path) -> None:
    found = bench.measure(replace(CELL, kind="kernels"), tmp_path)
    assert {"matrix products", "optimizer", "norms and softmax"} <= found.keys() <= {*KERNELS, "others"}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64", "matrix products"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_layer_norm_kernel<float, float>", "norms and softmax"),
        ("triton_poi_fused_add_gelu_3", "fused by Inductor"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "elementwise and reductions"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and casts"),
    ],
)
def test_kernels_of_a_gpu_are_told_apart_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_other_trainers_see_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, first in (("", "0"), ("3,4", "3")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        bench.one_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == first


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("trainer.precision=fp8: needs torchao"), "refused: trainer.precision=fp8: needs torchao"),
        (MemoryError("too much"), "out of memory (too much)"),
        (ValueError("a fault of the bench"), "Traceback "),
    ],
)
def test_an_error_is_the_reason(error, reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench, "measure", fail)
    monkeypatch.setattr(bench.os, "dup2", lambda *_: None)
    with pytest.raises(Failed) as failed:
        bench.attempt(CELL, str(tmp_path))
    assert str(failed.value).startswith(reason)
