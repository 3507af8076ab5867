"""The contract: every callback alone, and every pair, on 3 ranks. A pair is refused with both names, or keeps its
promises: exact ones give plain training's numbers, lossy ones stay within their bounds, and all resume bit for bit."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.callbacks import CHANGES, CODECS, OBSERVERS, name_of
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback, arrange
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.overlap.callback import Overlap
from trainer.checkpoint.serialize import optimizer_state
from trainer.comm.codecs import registry
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import adamw
from trainer.plan import Plan
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.timeout(420)  # the first test trains every case
STEPS, WORLD = 6, 3
# Of the update of the first step, relative in the L2 norm: 0 for what is exact. See the callback's card.
BOUNDS = {
    "bf16": (WORLD + 1) * 2**-8, "fp16": (WORLD + 1) * 2**-11, "int8": 4 / 127, "topk": 0.7**0.5, "dgc": 0.7**0.5,
    "topk between nodes": 0.7**0.5, "sign": 0.9, "powersgd": 0.9, "local_sgd": 0.1, "onebit_adam": 0.2,
}  # fmt: skip
ALL = {**OBSERVERS, **CHANGES, **CODECS}
TWO = (*CHANGES, "bf16")
REFUSED = {
    ("ema", "local_sgd"),
    ("local_sgd", "overlap"),
    *((row, "gradient_reader") for row in ("local_sgd", "onebit_adam", "overlap")),
    *((row, "onebit_adam") for row in ("hierarchical", "local_sgd", "nan_guard")),
    ("local_sgd", "nan_guard"),
    ("nan_guard", "overlap"),
    *(("onebit_adam", row) for row in ("overlap", "bf16")),
    *(("hierarchical", codec) for codec in ("int8", "topk", "dgc", "sign", "blocksparse")),
}
CASES: list[tuple[str, ...]] = [
    (),
    ("adamw",),  # a row that chooses the optimizer only
    *((row,) for row in (*CHANGES, *CODECS, "gradient_reader") if row != "topk between nodes"),
    tuple(OBSERVERS),
    *((row, *OBSERVERS) for row in TWO),  # every pair with an observer, and of observers
    *itertools.combinations(TWO, 2),
    *itertools.product(("overlap", "local_sgd"), ("fp16", "int8", "topk", "dgc", "sign", "powersgd", "blocksparse")),
    *(("hierarchical", codec) for codec in ("fp16", "powersgd")),
    ("hierarchical", "topk between nodes"),
    *sorted(REFUSED),
    ("ema", "overlap", "powersgd"),
    ("bucket", "hierarchical", "topk between nodes"),
    ("hierarchical", "local_sgd", "topk between nodes"),
    ("hierarchical", "overlap", "bf16"),
    ("activation_checkpoint", "ema", "overlap", "topk"),
]
CASES = list(dict.fromkeys(CASES))


class FirstStep(Callback):
    """Keeps the weights after the first step, where an approximation has not fed on itself yet."""

    def on_step_end(self, trainer) -> None:
        if trainer.step == 1:
            trainer.emit("on_flush")
            self.weights = flat(trainer.global_model)


class GradientReader(Callback):
    """A user's own, which can't run with what defers the reduction."""

    def on_before_optimizer_step(self, trainer) -> None:
        self.seen = sum(p.grad.sum().item() for p in trainer.parameters)


ALL |= {"gradient_reader": GradientReader, "adamw": Callback}


def flat(module: torch.nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel().copy() for p in module.parameters()])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


def adam(params: Any) -> torch.optim.Optimizer:
    return adamw(params, lr=0.01)


def by_adam(names: tuple[str, ...]) -> bool:
    return bool({"adamw", "onebit_adam"} & set(names))


def train(place: Place, names: tuple[str, ...], run: str, resume: str | None, backwards: bool) -> dict[str, Any]:
    first = FirstStep()
    callbacks = {name_of(row): ALL[row]() for row in (reversed(names) if backwards else names)}
    trainer = Trainer(
        Toy(samples=40, width=32, dropout=0.1, dtype="float64"),
        {**callbacks, "first_step": first},
        adam if by_adam(names) else sgd,
        batch=12,
        accumulate=2,
        options=Options(
            max_steps=STEPS, log_every_steps=1, validate_every=3, run_dir=f"runs/{run}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=3, keep=3), check_replicas_every=1,
        ),
        data=DataOptions(workers=0, lanes=5, block=4),
        place=replace(place, store=f"{place.store}-{run}"),
    )  # fmt: skip
    start = flat(trainer.module)
    trainer.fit()
    moments = optimizer_state(trainer.optimizer, trainer.module)
    return {
        "start": start,
        "first": getattr(first, "weights", None),
        "weights": flat(trainer.module),
        "moments": np.concatenate(
            [state["exp_avg" if by_adam(names) else "momentum_buffer"].numpy().ravel() for state in moments.values()]
        ),
        "validated": flat(trainer.eval_model),
        "validation": trainer.validation,
    }


def whole_table(place: Place) -> list[dict[str, Any]]:
    results = []
    for names in CASES:
        run = "+".join(names) or "plain"
        try:
            straight = train(place, names, run, None, backwards=False)
        except ConfigError as error:
            results.append({"refused": str(error)})
            continue
        resumed = train(place, names, f"{run}-resumed", f"ckpt/{run}/step-00000003", backwards=True)
        lossy = [name for name in names if not ALL[name]().exact]
        results.append({"straight": straight, "resumed": resumed, "bound": sum(BOUNDS[name] for name in lossy)})
    return results


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """What every rank gives for every case; the ranks are started once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("contract"))
        by_rank = run_ranks(WORLD, whole_table, timeout_s=400)
        metrics = {path.parent.name: path.read_text().splitlines() for path in Path("runs").glob("*/metrics.jsonl")}
    cases = dict(zip(CASES, zip(*by_rank, strict=True), strict=True))
    return {names: [{**rank, "metrics": metrics} for rank in ranks] for names, ranks in cases.items()}


def test_every_callback_and_every_codec_is_in_the_table():
    tested = {name_of(row) for row in ALL} - {"gradient_reader", "adamw"}
    assert tested == {path.stem for path in Path(__file__).parent.parent.glob("conf/callbacks/*.yaml")}
    assert set(registry.CODECS) <= {row for case in CASES for row in case}


@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_refused_or_kept(table, names):
    if names in REFUSED:
        assert all({name_of(row) for row in names} <= set(rank["refused"].split()) for rank in table[names])
        return
    plain = table[("adamw",) if by_adam(names) else ()][0]["straight"]
    for rank in table[names]:
        assert "refused" not in rank, rank.get("refused")
        straight, resumed, bound = rank["straight"], rank["resumed"], rank["bound"]
        assert distance(straight, plain, "first") <= max(bound, 1e-12)
        assert distance(straight, plain, "weights") <= max(3 * bound, 1e-12)  # errors feed on each other in 6 steps
        assert (distance(straight, plain, "weights") > 1e-9) == bool(bound)  # what is called lossy is at work
        for key in ("weights", "moments", "validated"):
            assert straight[key].tobytes() == resumed[key].tobytes(), key
        assert straight["validation"] == resumed["validation"]


def without_overlap(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name != "overlap")


OVERLAPPED = [
    names for names in CASES if "overlap" in names and names not in REFUSED and without_overlap(names) in CASES
]


@pytest.mark.parametrize("names", OVERLAPPED, ids="+".join)
def test_overlap_changes_no_bits(table, names):
    for rank, other in zip(table[names], table[without_overlap(names)], strict=True):
        assert rank["straight"]["weights"].tobytes() == other["straight"]["weights"].tobytes()


def distance(one: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """Of two updates, relative in the L2 norm."""
    return float(np.linalg.norm(one[key] - other[key]) / np.linalg.norm(other[key] - other["start"]))


@pytest.mark.parametrize("names", [names for names in CASES if "metrics_file" in names], ids="+".join)
def test_metrics_are_the_same_after_a_resume(table, names):
    metrics = table[names][0]["metrics"]
    straight, resumed = ([numbers(line) for line in metrics["+".join(names) + end]] for end in ("", "-resumed"))
    assert resumed == [line for line in straight if line["step"] > 3]
    assert len(resumed) == 4  # steps 4 to 6 and a validation


def numbers(line: str) -> dict[str, float]:
    return {k: v for k, v in json.loads(line).items() if k in ("step", "samples") or k.startswith(("train/", "val/"))}


@pytest.mark.parametrize("names", [names for names in CASES if names not in REFUSED], ids="+".join)
def test_the_order_in_the_config_means_nothing(names):
    assert list(arrange({name_of(n): ALL[n]() for n in names}, set())) == list(
        arrange({name_of(n): ALL[n]() for n in reversed(names)}, set())
    )


def test_a_conflict_with_a_setting_names_a_feature():
    """One that was renamed would be guarded against no more."""
    on = Options(clip_norm=1.0, precision="fp16", ddp=DDPOptions(None, True, True, True))
    features = Plan.features(SimpleNamespace(options=on))
    capabilities = {capability for make in ALL.values() for capability in make().provides}
    for row, make in ALL.items():
        assert {key for key in make().conflicts if isinstance(key, str)} <= features | capabilities, row
        assert make().requires.keys() <= capabilities, row


def test_conflicts_are_reported_all_at_once():
    with pytest.raises(ConfigError) as refusal:
        arrange(
            {"overlap": Overlap(), "grad_compress": GradCompress(feedback=True), "other": Overlap()}, {"clip", "fp16"}
        )
    for words in (
        "overlap and clip",
        "overlap and fp16",
        "grad_compress and fp16",
        "other and overlap both decide what a step does (role OPTIMIZER): leave one out",
    ):
        assert words in str(refusal.value)


def test_a_misspelt_hook_is_an_error_when_the_class_is_defined():
    with pytest.raises(TypeError, match="on_stepend"):
        type("Wrong", (Callback,), {"on_stepend": lambda self, trainer: None})
