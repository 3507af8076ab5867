"""Stochastic rounding: unbiased, keyed, the same on all ranks; it moves weights that round to nearest leaves."""

from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from support.sharded import Case, adam, fit
from torch import nn
from toy_recipe import Toy

from trainer import rng
from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.auto_batch import AutoBatch
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd import LocalSGD
from trainer.callbacks.nan_guard import NanGuard
from trainer.callbacks.onebit_adam import OneBitAdam
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.pipeline import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.errors import ConfigError
from trainer.optim.factories import adafactor, adamw8bit, lamb, lars
from trainer.precision import Precision
from trainer.precision.rounding import random_words, round_steps, rounded, store_in_bf16
from trainer.process.environment import Place

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SIGMAS = 5.0


def test_random_words_are_those_of_the_hash_of_data():
    expected = rng.mix_each(3, rng.ROUNDING, 7, 2, last=np.arange(256, dtype=np.uint64)).view(np.uint16)
    found = random_words(rng.mix(3, rng.ROUNDING, 7, 2), 1023, CPU)
    assert found.tolist() == expected.tolist()[:1023]


def test_words_are_uniform_and_those_of_neighbours_steps_and_parameters_have_nothing_in_common():
    n = 1 << 16
    words = [random_words(rng.mix(0, rng.ROUNDING, *key), n, CPU).double() for key in ((0, 0), (0, 1), (1, 0), (1, 1))]
    counts = torch.histc(words[0], 256, 0, 65536)
    assert abs((counts - 256).square().sum().item() / 256 - 255) < SIGMAS * (2 * 255) ** 0.5  # chi-squared
    centred = [(word - 32767.5) / (65536 / 12**0.5) for word in words]
    pairs = [(a, b) for i, a in enumerate(centred) for b in centred[:i]]
    pairs += [(centred[0][lag:], centred[0][:-lag]) for lag in (1, 2, 3, 4, 8)]
    assert all(abs((a * b).mean().item()) < SIGMAS / len(a) ** 0.5 for a, b in pairs)


def test_rounding_is_unbiased_and_takes_one_of_the_two_neighbours():
    torch.manual_seed(0)
    scales = 2.0 ** torch.randint(-60, 60, (512,))
    x = torch.randn(512) * scales
    draws = torch.stack([rounded(x, rng.mix(5, key)) for key in range(4000)]).double()
    low = (x.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    unit = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double() - low  # away from zero
    share = (x.double() - low) / unit
    up = (draws != low).double()
    assert bool(((draws == low) | (draws == low + unit)).all())
    deviation = (share * (1 - share) / len(draws)).sqrt()
    assert bool(((up.mean(0) - share).abs() <= SIGMAS * deviation + 1e-12).all())
    # All values together: a bias of 1 % of a unit would be 50 standard deviations.
    assert abs((up.mean(0) - share).mean().item()) < SIGMAS * deviation.square().sum().sqrt().item() / 512


def test_bf16_numbers_and_numbers_that_are_not_finite_stay():
    special = [0.0, -0.0, 1.0, -3.5, 2.0**-133, torch.finfo(BF16).max, float("inf"), -float("inf")]
    x = torch.tensor(special)
    for key in range(50):
        assert torch.equal(rounded(x, rng.mix(key)).float(), x)
        odd = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)  # NaN, each
        assert bool(rounded(odd, rng.mix(key)).isnan().all())
    strided = torch.randn(8, 6).T
    assert torch.equal(rounded(strided, 1), rounded(strided.contiguous(), 1))


def one_weight(value: float) -> nn.Module:
    module = nn.Linear(64, 64, bias=False)
    nn.init.constant_(module.weight, value)
    store_in_bf16(module)
    return module


def test_tiny_updates_stall_when_rounded_to_nearest_and_not_when_rounded_stochastically():
    """1 - 1e-4 is nearer to 1 than to the next bf16 number, 0.996."""
    steps, rate = 400, 1e-4
    means = []
    for stochastic in (False, True):
        module, done = one_weight(1.0), count()
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        if stochastic:
            round_steps(optimizer, module, 0, partial(next, done))
        for _ in range(steps):
            module.weight.grad = torch.ones_like(module.weight)
            optimizer.step()
        assert module.weight.dtype == BF16
        means.append(module.weight.double().mean().item())
    assert means[0] == 1.0
    spread = (steps * rate * 2**-8 / 4096) ** 0.5  # of the mean of 4096 weights: a step moves one by 2^-8, rarely
    assert abs(means[1] - (1 - steps * rate)) < SIGMAS * spread


def test_a_step_is_the_float32_optimizers_rounded_and_moments_are_float32():
    """On a copy in float32 of what is in bf16; hooks of a step run once, around chunks of parameters."""
    torch.manual_seed(0)
    module, calls = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), []
    store_in_bf16(module)
    masters = [p.detach().float().requires_grad_() for p in module.parameters()]
    groups = [{"params": list(module.parameters())[:2]}, {"params": list(module.parameters())[2:], "lr": 0.02}]
    optimizer = round_steps(torch.optim.AdamW(groups, lr=0.01), module, 3, lambda: 11)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    plain = torch.optim.AdamW([{"params": masters[:2]}, {"params": masters[2:], "lr": 0.02}], lr=0.01)
    memory = [p.data_ptr() for p in module.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.precision.rounding.CHUNK", 20)
        for p, master in zip(module.parameters(), masters, strict=True):
            p.grad = torch.randn_like(p)
            master.grad = p.grad.float()
        optimizer.step()
        plain.step()
    for i, (p, master) in enumerate(zip(module.parameters(), masters, strict=True)):
        assert torch.equal(p.detach(), rounded(master.detach(), rng.mix(3, rng.ROUNDING, 11, i)))
        assert p.grad is not None and p.grad.dtype == BF16
        assert torch.equal(optimizer.state[p]["exp_avg"], plain.state[master]["exp_avg"])
    assert calls == ["pre", "post"] and memory == [p.data_ptr() for p in module.parameters()]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [*map(id, module.parameters())]
    assert set(optimizer.state) == set(module.parameters())


@pytest.mark.parametrize("make", [lamb, lars, adafactor, partial(adamw8bit, min_8bit_size=16)])
def test_other_optimizers_step_float32_copies_too(make):
    torch.manual_seed(0)
    module = nn.Linear(32, 32)
    store_in_bf16(module)
    master = module.weight.detach().float().requires_grad_()
    optimizer = round_steps(make([{"params": [module.weight]}], lr=0.05), module, 0, lambda: 0)
    plain = make([{"params": [master]}], lr=0.05)
    module.weight.grad = torch.randn_like(module.weight)
    master.grad = module.weight.grad.float()
    optimizer.step()
    plain.step()
    assert torch.equal(module.weight.detach(), rounded(master.detach(), rng.mix(0, rng.ROUNDING, 0, 0)))


def test_batch_norm_keeps_float32_parameters_which_steps_do_not_round():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net = Precision("bf16_params", CPU, master_weights=False).convert(net)
    assert [p.dtype for p in net.parameters()] == [BF16, BF16, torch.float32, torch.float32, BF16, BF16]
    optimizer = round_steps(torch.optim.SGD(net.parameters(), lr=1e-6), net, 0, lambda: 0)
    net(torch.randn(8, 4)).square().sum().backward()
    weight, gradient = net[1].weight.detach().clone(), net[1].weight.grad
    optimizer.step()
    assert torch.equal(net[1].weight, weight - 1e-6 * gradient) and not torch.equal(net[1].weight, weight)


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp32"])
def test_float32_weights_without_masters_are_refused(precision):
    with pytest.raises(ConfigError, match=rf"master_weights=false: precision={precision} stores weights in float32"):
        Precision(precision, CPU, master_weights=False)


def test_parameters_of_another_format_are_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with refuses("trainer.master_weights=false", "1.weight", "trainer.master_weights=true"):
        Precision("bf16_params", CPU, master_weights=False).convert(net)


class Types(Callback):
    """The types and bytes of what is stored."""

    def on_before_optimizer_step(self, trainer) -> None:
        self.gradients = {str(p.grad.dtype) for p in trainer.parameters if p.grad is not None}

    def on_step_end(self, trainer) -> None:
        self.weights = {str(p.dtype) for p in trainer.module.parameters()}
        self.state = {str(v.dtype) for s in trainer.optimizer.state.values() for v in s.values() if v.dim()}

    def on_fit_end(self, trainer) -> None:
        Types.seen = vars(self)

    seen: dict[str, Any] = {}


def case(run: str, callbacks: dict[str, Callback] | None = None, optimizer: Any = adam, **options: Any) -> Case:
    options = {"precision": "bf16_params", "master_weights": False, "clip_norm": None, **options}
    return Case(callbacks or {}, options, Toy(width=32, depth=3, dropout=0.1), optimizer, steps=6, run=run)


SAME: dict[str, dict[str, Callback]] = {
    "shard": {"shard": Shard(1)},
    "shard.2": {"shard": Shard(2)},
    "activation_checkpoint": {"activation_checkpoint": ActivationCheckpoint()},
    "optimizer_in_backward": {"optimizer_in_backward": OptimizerInBackward()},
    "nan_guard": {"nan_guard": NanGuard("rollback", every=2)},
}
CLOSE: dict[str, dict[str, Callback]] = {
    "overlap": {"overlap": Overlap()},
    "auto_batch": {"auto_batch": AutoBatch(max_micro=2)},
    "topk": {"grad_compress": GradCompress("topk", density=0.5)},
    "powersgd": {"grad_compress": GradCompress("powersgd")},
}
REFUSED: dict[str, dict[str, Callback]] = {
    "ema": {"ema": EMA()},
    "local_sgd": {"local_sgd": LocalSGD()},
    "onebit_adam": {"onebit_adam": OneBitAdam()},
    "pipeline": {"pipeline": PipelineParallel(stages=3)},
    "shard": {"shard": Shard(3)},
}


def runs(place: Place, cases: list[Case]) -> dict[str, dict[str, Any]]:
    found = {}
    for each, result in zip(cases, fit(place, cases), strict=True):
        found[each.run] = result | {"types": Types.seen}
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_stay_equal_a_resume_has_the_same_bits_and_callbacks_have_plain_trainings(tmp_path):
    cases = [
        case("fp32", precision="fp32", master_weights=True),
        case("plain", {"types": Types()}),
        case("resumed", resume="ckpt/plain/step-00000003"),
        case("masters", master_weights=True, resume="ckpt/plain/step-00000003"),
        case("seed", seed=1),
        *(case(name, callbacks) for name, callbacks in (SAME | CLOSE).items()),
        case("late", {"overlap": Overlap()}, resume="ckpt/overlap/step-00000003"),
    ]
    ranks = run_ranks(3, runs, cases)
    bounds = {"plain": 0.01, "auto_batch": 0.01, "overlap": 0.01, "powersgd": 0.01, "topk": 0.05}  # of the loss, 0.17
    for found in ranks:
        assert "checkpoint of another model (names, shapes or dtypes" in found.pop("masters")["refused"]
        assert not (refused := {run: each["refused"] for run, each in found.items() if "refused" in each}), refused
        plain, float32 = found["plain"], found["fp32"]
        types = {"weights": {"torch.bfloat16"}, "gradients": {"torch.bfloat16"}, "state": {"torch.float32"}}
        assert found["plain"]["types"] == types
        for key in ("weights", "losses", "validation"):
            assert np.array_equal(plain[key], ranks[0]["plain"][key]) or plain[key] == ranks[0]["plain"][key], key
        np.testing.assert_array_equal(plain["weights"], found["resumed"]["weights"])
        assert plain["losses"][3:] == found["resumed"]["losses"]
        np.testing.assert_array_equal(found["overlap"]["weights"], found["late"]["weights"])
        for run in SAME:
            np.testing.assert_array_equal(plain["weights"], found[run]["weights"], err_msg=run)
        for run, bound in bounds.items():
            assert abs(found[run]["losses"][-1] - float32["losses"][-1]) < bound, run
        assert not np.array_equal(plain["weights"], found["seed"]["weights"])


def test_callbacks_that_would_average_or_cut_the_weights_are_refused(tmp_path):
    for found in run_ranks(3, runs, [case(name, callbacks) for name, callbacks in REFUSED.items()]):
        for run, each in found.items():
            assert f"{run} and bf16_weights can't run together" in each["refused"], run
            assert "trainer.master_weights=true" in each["refused"]
