"""Each rule on both sides of its limit, and each setting that it names through the check of configs."""

import math
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support.cli import ROOT

from trainer.config.batch import split_batch
from trainer.config.check import LIBRARIES, check
from trainer.config.compose import merge_callbacks, normalize
from trainer.config.folders import CONF
from trainer.monitors.advice.rules import RULES, Finding, Numbers, Run, find
from trainer.session import build_components

OPEN = Run(
    world=4, nodes=2, data_world=4, cuda=True, precision="bf16", batch=32, micro=8, accumulate=1, splits=False,
    workers=2, prefetch=2, gradient_mib=400.0, cores=8, fixed_interval=True, profiles=False, offloads="",
    skips=False, pcie_mib_s=1000.0, fits=lambda: 8, accepts=lambda name, **knobs: True,
)  # fmt: skip
CLOSED = replace(OPEN, accepts=lambda name, **knobs: False)
STEP = {"time/step": 1.0, "time/forward": 0.2, "time/backward": 0.4}
SHORT = {"time/step": 0.022, "time/data_max": 0.0199}  # what workers take to hand a batch over
SLOW = {**STEP, "time/communication_min": 0.2}

# Rule -> numbers at the limit, numbers beyond it, run, settings that answer.
CASES: list[tuple[str, Numbers, Numbers, Run, str]] = [
    ("utilisation", {"gpu/utilisation_min": 0.85}, {"gpu/utilisation_min": 0.84}, OPEN, "'+callbacks=[compile]'"),
    ("utilisation", {}, {"gpu/utilisation_min": 0.5}, replace(OPEN, batch=64, accumulate=2, fits=lambda: 16),
     "micro_batch=16 accumulate=1"),
    ("utilisation", {}, {"gpu/utilisation_min": 0.5}, replace(CLOSED, accumulate=2), "'+callbacks=[profiler]'"),
    ("utilisation", {}, {"gpu/utilisation_min": 0.5, **STEP, "time/data_max": 0.1}, OPEN, "data.workers=4"),
    ("utilisation", {}, {"gpu/utilisation_min": 0.5, **STEP, "time/data_max": 0.06, "time/communication_min": 0.1},
     OPEN, "'+callbacks=[overlap]'"),
    ("utilisation", {}, {"gpu/utilisation": 0.8575, "gpu/utilisation_min": 0.0, "gpu/idlest_rank": 3}, OPEN,
     "'+callbacks=[profiler]' callbacks.profiler.ranks=[3]"),
    ("utilisation_swing", {"gpu/utilisation_spread": 0.15}, {"gpu/utilisation_spread": 0.16}, OPEN,
     "'+callbacks=[profiler]'"),
    ("utilisation_swing", {}, {"gpu/utilisation_spread": 0.5, **STEP, "time/checkpoint": 0.1}, OPEN,
     "trainer.checkpoint.every=auto"),
    ("communication", {**STEP, "time/communication_min": 0.18}, SLOW, OPEN, "'+callbacks=[overlap]'"),
    ("communication", {}, SLOW, replace(OPEN, accepts=lambda name: name != "overlap"), "'+callbacks=[hierarchical]'"),
    ("communication", {}, SLOW, replace(OPEN, nodes=1, accepts=lambda name: name != "overlap"),
     "'+callbacks=[grad_compress]'"),
    ("communication", {}, SLOW, CLOSED, "'+callbacks=[profiler]'"),
    ("communication", {}, SLOW, replace(OPEN, gradient_mib=0.9), "batch=64"),
    ("communication", {}, SLOW, replace(OPEN, data_world=2, micro=16), "micro_batch=8 accumulate=2"),
    ("communication", {}, SLOW, replace(OPEN, batch=30, data_world=2, micro=15), "'+callbacks=[overlap]'"),
    ("communication", {}, SLOW, replace(CLOSED, profiles=True), "callbacks.profiler.with_stack=true"),
    ("data_wait", {**STEP, "time/data_max": 0.05}, {**STEP, "time/data_max": 0.051}, OPEN, "data.workers=4"),
    ("data_wait", {}, {**STEP, "time/data_max": 0.2}, replace(OPEN, workers=0), "data.workers=2"),
    ("data_wait", SHORT, {**SHORT, "time/data_max": 0.02}, replace(OPEN, workers=0), "data.workers=2"),
    ("utilisation_swing", SHORT, {**SHORT, "gpu/utilisation_spread": 0.2}, OPEN, "'+callbacks=[profiler]'"),
    ("data_wait", {}, {**STEP, "time/data_max": 0.2}, replace(OPEN, workers=8), "data.prefetch=4"),
    ("checkpoint", {"advice/checkpoint": 0.035}, {"advice/checkpoint": 0.036, **STEP}, OPEN,
     "trainer.checkpoint.every=auto"),
    ("checkpoint", {}, {"advice/checkpoint": 0.1}, replace(OPEN, fixed_interval=False),
     "trainer.checkpoint.when_busy=skip"),
    ("straggler", {"time/spread": 0.1, "time/slowest_rank": 2}, {"time/spread": 0.11, "time/slowest_rank": 2}, OPEN,
     "'+callbacks=[hetero_batch]'"),
    ("straggler", {}, {"time/spread": 0.11, "time/slowest_rank": 2}, CLOSED,
     "'+callbacks=[profiler]' callbacks.profiler.ranks=[2]"),
    ("memory_skew", {"perf/memory_skew": 0.2, "perf/peak_memory_gib": 10},
     {"perf/memory_skew": 0.21, "perf/peak_memory_gib": 10}, OPEN,
     "'+callbacks=[profiler]' callbacks.profiler.profile_memory=true"),
    ("memory_skew", {"perf/memory_skew": 0.5, "perf/peak_rss_gib": 1.9},
     {"perf/memory_skew": 0.5, "perf/peak_rss_gib": 2.0}, OPEN,
     "'+callbacks=[profiler]' callbacks.profiler.profile_memory=true"),
    ("pcie", {"gpu/pcie_rx_mib_s": 800}, {"gpu/pcie_rx_mib_s": 10, "gpu/pcie_tx_mib_s": 801}, OPEN,
     "'+callbacks=[grad_compress]'"),
    ("pcie", {}, {"gpu/pcie_rx_mib_s": 801}, replace(OPEN, offloads="activation_checkpoint"),
     "callbacks.activation_checkpoint.policy=full"),
    ("pcie", {}, {"gpu/pcie_rx_mib_s": 801}, replace(OPEN, world=1), "'+callbacks=[profiler]'"),
    ("batch", {**SLOW, "perf/peak_memory_gib": 9}, {**SLOW, "perf/peak_memory_gib": 9}, replace(OPEN, fits=lambda: 40),
     "batch=128 micro_batch=32 accumulate=1"),
    ("attention", {"kernel/math_attention": 0}, {"kernel/math_attention": 12}, OPEN, "'+callbacks=[compile]'"),
    ("attention", {}, {"kernel/math_attention": 12}, replace(OPEN, precision="tf32"), "trainer.precision=bf16"),
    ("attention", {}, {"kernel/math_attention": 12}, CLOSED,
     "'+callbacks=[profiler]' callbacks.profiler.record_shapes=true"),
    ("optimizer", {"kernel/looping_groups": 0}, {"kernel/looping_groups": 2, "kernel/fused_optimizer": 1}, OPEN,
     "optimizer.fused=true"),
    ("optimizer", {}, {"kernel/looping_groups": 2}, OPEN, "optimizer.foreach=true"),
    ("tf32", {"kernel/without_tf32": 0}, {"kernel/without_tf32": 1}, OPEN, "trainer.precision=tf32"),
    ("graph_breaks", {"kernel/graph_breaks": 0}, {"kernel/graph_breaks": 1}, OPEN,
     "'+callbacks=[profiler]' callbacks.profiler.with_stack=true"),
    ("recompiles", {"compile/recompiles": 0}, {"compile/recompiles": 1}, OPEN,
     "'+callbacks=[profiler]' callbacks.profiler.record_shapes=true"),
    ("unused_parameters", {}, {"kernel/no_unused_parameters": 1}, OPEN, "trainer.ddp.find_unused_parameters=false"),
    ("gradient_layout", {}, {"kernel/copied_gradients": 1}, OPEN,
     "'+callbacks=[profiler]' callbacks.profiler.with_stack=true"),
]  # fmt: skip


def of(name: str, numbers: Numbers, run: Run) -> Finding | None:
    return next((finding for finding in find(numbers, run) if finding.name == name), None)


@pytest.mark.parametrize(("name", "within", "beyond", "run", "config"), CASES)
def test_a_rule_speaks_beyond_its_limit(name, within, beyond, run, config):
    assert of(name, within, OPEN) is None
    finding = of(name, beyond, run)
    assert finding is not None and finding.config == config
    worse = finding.value < finding.limit if name in ("utilisation", "batch") else finding.value > finding.limit
    assert worse and len(finding.text) < 180


@pytest.mark.parametrize(
    ("mean", "rank", "reason"),
    [(0.8575, "3", "the others are busier"), (0.4, "3", "its kernels are too small or too few")],
)
def test_the_gpu_that_idles_most_is_named(mean, rank, reason):
    numbers = {"gpu/utilisation": mean, "gpu/utilisation_min": 0.1, "gpu/idlest_rank": float(rank)}
    assert (finding := of("utilisation", numbers, OPEN)) is not None
    assert finding.text == f"the GPU of rank {rank} is busy for 10% of the time, and should be for 85%: {reason}"


def test_a_run_with_rare_checkpoints_is_told_of_no_more_settings():
    """A GPU that idles for them still has its reason."""
    rare = replace(CLOSED, fixed_interval=False, skips=True)
    assert of("checkpoint", {"advice/checkpoint": 0.1}, rare) is None
    idle = of("utilisation", {"gpu/utilisation_min": 0.5, **STEP, "time/checkpoint": 0.3}, rare)
    assert idle is not None and idle.text.endswith(": steps wait 30% of their time for checkpoint")
    assert idle.config == "'+callbacks=[profiler]'"


def test_each_rule_has_a_case():
    named = {rule.__name__ for rule in RULES}
    assert {name for name, *_ in CASES} == {name.replace("swing", "utilisation_swing") for name in named}


def test_without_numbers_nothing_is_said():
    assert find({}, replace(OPEN, fits=lambda: 100)) == []
    assert find({"gpu/utilisation_min": math.nan, "time/step": 0.0, "time/data_max": 1.0}, OPEN) == []


@pytest.mark.parametrize(
    "other",
    [{"cuda": False}, {"world": 1}, {"accumulate": 2}, {"splits": True}, {"fits": lambda: 15}, {"fits": lambda: 0}],
)
def test_a_batch_is_not_judged(other: dict[str, Any]):
    numbers = {**SLOW, "perf/peak_memory_gib": 9}
    full = replace(OPEN, fits=lambda: 16)
    assert of("batch", numbers, full) and not of("batch", numbers, replace(full, **other))
    assert not of("batch", {**STEP, "perf/peak_memory_gib": 9, "gpu/utilisation": 0.9}, full)  # nothing to gain
    assert not of("batch", SLOW, full)  # memory is not measured


# What the run has where a setting is named that only such a run gets.
OWN = {
    "callbacks.profiler.": ["+callbacks=[profiler]"],
    "callbacks.activation_checkpoint.": ["+callbacks=[activation_checkpoint]"],
    "optimizer.": ["optimizer._target_=torch.optim.AdamW", "optimizer.foreach=false"],
}


def composed(words: list[str]) -> Any:
    """Compose as the command does, in this process."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", merge_callbacks([normalize(word, [CONF]) for word in words]))
    toy = {"_target_": "toy_recipe.Toy"}  # the default recipe would load transformers
    return {**OmegaConf.to_container(config, resolve=True), "recipe": toy}  # pyright: ignore[reportGeneralTypeIssues]


@pytest.mark.parametrize(("config", "run"), {config: run for *_, run, config in CASES}.items())
def test_each_setting_is_one_that_the_command_takes(config: str, run: Run):
    words = [f"batch={run.batch}", *(word for start, own in OWN.items() if config.startswith(start) for word in own)]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "toy")
        found = composed([*words, *shlex.split(config)])
        check(found, (*LIBRARIES, "toy_recipe"))
        build_components(found, (*LIBRARIES, "toy_recipe"))
    key, _, value = shlex.split(config)[-1].partition("=")
    if key != "+callbacks":
        assert str(OmegaConf.select(OmegaConf.create(found), key)).lower() == value
    split_batch(found["batch"], run.data_world, found["micro_batch"], found["accumulate"])
