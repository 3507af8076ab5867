"""The contract: every callback alone, and every pair, on 3 ranks, or on 4 with CONTRACT_RANKS=4. A pair is refused with
both names, or keeps its promises: exact ones give plain training's numbers, lossy ones stay within their bounds, and
all resume bit for bit.

Without `-m pairs` only some callbacks are trained, and some pairs that change the same thing.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.callbacks import CHANGES, CODECS, OBSERVERS, RANKS, STAGES, name_of
from support.quick import selected
from support.ranks import groups_left, run_ranks
from support.runs import sgd
from support.sharded import adam, whole
from toy_recipe import Toy

from trainer.callback import Callback, overrides
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.overlap.callback import Overlap
from trainer.checkpoint.serialize import optimizer_state
from trainer.comm.bucket import Bucket
from trainer.comm.codecs import registry
from trainer.comm.codecs.base import Codec, ErrorFeedback
from trainer.comm.reduce import Reduce
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.plan import Plan
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.timeout(600)  # the first test trains all that run
STEPS, WORLD, EVERY = 6, RANKS, 2
# Of the first common update, relative in the L2 norm: 0 for what is exact. See the callback's card.
BOUNDS = {
    "bf16": (WORLD + 1) * 2**-8, "fp16": (WORLD + 1) * 2**-11, "int8": 4 / 127, "topk": 0.7**0.5, "dgc": 0.7**0.5,
    "topk between nodes": 0.7**0.5, "sign": 0.9, "powersgd": 0.9, "local_sgd": 0.1, "onebit_adam": 0.2,
    "pipeline.2bw": 0.5,
}  # fmt: skip
LOSSY = 1.0  # the bound of another callback or codec that is not exact
COSINE = 0.7  # of an update with plain training's, at the least; the signs alone give 0.79
ALL = {**OBSERVERS, **CHANGES, **CODECS}
TWO = (*CHANGES, "bf16")
PIPELINES = ("pipeline", "pipeline.2bw")
LATER = {"local_sgd", "pipeline.2bw"}  # the second step changes weights as plain training does, the first one does not
REFUSED = {
    ("ema", "local_sgd"),
    ("ema", "swa"),
    ("local_sgd", "swa"),
    ("local_sgd", "overlap"),
    *((row, "gradient_reader") for row in ("local_sgd", "onebit_adam", "optimizer_in_backward", "overlap")),
    *((row, "onebit_adam") for row in ("hierarchical", "local_sgd", "nan_guard")),
    ("local_sgd", "nan_guard"),
    ("nan_guard", "overlap"),
    *(
        (row, "optimizer_in_backward")
        for row in ("auto_batch", "hetero_batch", "local_sgd", "nan_guard", "onebit_adam")
    ),
    *(("optimizer_in_backward", row) for row in ("overlap", *PIPELINES, "shard", "shard.2", "shard.3")),
    *itertools.product(("auto_batch", "compile", "hetero_batch"), PIPELINES),
    *itertools.product(PIPELINES, ("shard.2", "shard.3")),
    ("pipeline.2bw", "shard"),
    *((row, "pipeline.2bw") for row in ("nan_guard", "gradient_reader")),
    *((f"activation_checkpoint.{row}", "compile") for row in ("budget", "offload")),
    *(("activation_checkpoint.budget", pipeline) for pipeline in PIPELINES),
    ("compile", "overlap"),
    ("auto_batch", "hetero_batch"),
    ("auto_batch", "overlap"),
    *(("hetero_batch", row) for row in ("local_sgd", "onebit_adam", "overlap")),
    *(("onebit_adam", row) for row in ("optimizer_in_backward", "overlap", "bf16")),
    *((row, shard) for row in ("bucket", "local_sgd", "onebit_adam", "overlap") for shard in ("shard", "shard.2")),
    *((row, "shard.3") for row in ("auto_batch", "bucket", "hetero_batch", "hierarchical")),
    *((row, "shard.3") for row in ("local_sgd", "onebit_adam", "overlap")),
    ("shard.3", "bf16"),
    *(("hierarchical", codec) for codec in ("int8", "topk", "dgc", "sign", "blocksparse")),
    *itertools.product(("bucket", "hierarchical", "local_sgd", "onebit_adam", "overlap"), PIPELINES),
}
READERS = [row for row in CHANGES if overrides(CHANGES[row](), "on_before_optimizer_step")]
DEFERRING = [row for row in CHANGES if "defers" in CHANGES[row]().provides]
REFUSED |= {pair for pair in itertools.combinations(CHANGES, 2) if set(pair) & {*READERS} and set(pair) & {*DEFERRING}}
CASES: list[tuple[str, ...]] = [
    (),
    ("adamw",),  # a row that chooses the optimizer only
    ("staged",),  # a row that chooses a model for stages, without dropout, whose numbers are keyed by stage
    *((row,) for row in (*CHANGES, *CODECS, "gradient_reader") if row != "topk between nodes"),
    tuple(OBSERVERS),
    *((row, *OBSERVERS) for row in TWO),  # every pair with an observer, and of observers
    *(pair for pair in itertools.combinations(TWO, 2) if len(set(map(name_of, pair))) == 2),
    *itertools.product(("overlap", "local_sgd"), (codec for codec in registry.CODECS if codec != "bf16")),
    *(("hierarchical", codec) for codec in ("fp16", "powersgd")),
    ("hierarchical", "topk between nodes"),
    ("ema", "overlap", "powersgd"),
    ("bucket", "hierarchical", "topk between nodes"),
    ("hierarchical", "local_sgd", "topk between nodes"),
    ("hierarchical", "overlap", "bf16"),
    ("activation_checkpoint", "ema", "overlap", "topk"),
]
CASES = list(dict.fromkeys(CASES))
if WORLD == STAGES:  # no replicas; tests/callbacks/pipeline trains these pairs with some
    for pair in (("pipeline", "shard"), ("pipeline", "bf16"), ("pipeline.2bw", "bf16")):
        CASES.remove(pair)
# Some that change the same thing: buckets, reduction, weights, or the optimizer's steps. The other pairs: `-m pairs`.
RISKY: list[tuple[str, ...]] = [
    ("bucket", "optimizer_in_backward"),
    ("bucket", "overlap"),
    ("ema", "shard.3"),
    ("nan_guard", "shard.2"),
    ("local_sgd", "overlap"),
    ("ema", "overlap", "powersgd"),
    ("hierarchical", "local_sgd", "topk between nodes"),
]


ALONE = {  # rows that each run of the tests trains: what plain training is compared with, and some of each kind
    "adamw", "hierarchical", "nan_guard", "onebit_adam", "shard.3", "topk",
}  # fmt: skip


def every_change(names: tuple[str, ...]) -> bool:
    """Return whether each run of the tests has this case."""
    return (len(names) < 2 and set(names) <= ALONE) or names == tuple(OBSERVERS) or names in RISKY


def params(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    return [pytest.param(case, marks=() if every_change(case) else pytest.mark.pairs) for case in cases]


class Early(Callback):
    """Keeps the weights after the first steps, where an approximation has not fed on itself yet, and the last state."""

    def __init__(self) -> None:
        self.weights: dict[int, np.ndarray] = {}
        self.moments: dict[str, dict[str, Any]] = {}

    def on_step_end(self, trainer) -> None:
        if trainer.step <= EVERY:
            trainer.emit("on_flush")
            self.weights[trainer.step] = flat(trainer.global_model)

    def on_fit_end(self, trainer) -> None:
        """Gathers what is whole only while the ranks are together."""
        if trainer.step == STEPS:
            self.last, self.validated = flat(trainer.module), flat(trainer.eval_model)
            states = optimizer_state(trainer.optimizer, trainer.module).items()
            self.moments = {name: {key: whole(value) for key, value in state.items()} for name, state in states}


class Silent(Codec):
    """Sends nothing: its mean is zero, which no bound may allow."""

    def mean(self, flat: torch.Tensor, out: torch.Tensor, bucket: Bucket, reduce: Reduce) -> None:
        out.zero_()


class GradientReader(Callback):
    """A user's own, which can't run with what defers the reduction."""

    def on_before_optimizer_step(self, trainer) -> None:
        self.seen = sum(p.grad.sum().item() for p in trainer.parameters)


ALL |= {"gradient_reader": GradientReader, "adamw": Callback, "staged": Callback}


def flat(module: torch.nn.Module) -> np.ndarray:
    return np.concatenate([whole(p).numpy().ravel().copy() for p in module.parameters()])


def by_adam(names: tuple[str, ...]) -> bool:
    """Gradients that are a step late swing with SGD at the toy's rate."""
    return bool({"adamw", "onebit_adam", "pipeline.2bw"} & set(names))


def first(names: tuple[str, ...]) -> int:
    """The step after which ranks first have the same, and an update."""
    return EVERY if LATER & set(names) else 1


def in_stages(names: tuple[str, ...]) -> bool:
    return bool({"staged", *PIPELINES} & set(names))


def reference(names: tuple[str, ...]) -> tuple[str, ...]:
    """The plain training whose numbers an exact callback keeps."""
    return ("staged",) * in_stages(names) + ("adamw",) * by_adam(names)


def train(
    place: Place, names: tuple[str, ...], run: str, resume: str | None = None, silent: bool = False
) -> dict[str, Any]:
    """A resume has the callbacks in the opposite order."""
    early = Early()
    callbacks = {name_of(row): ALL[row]() for row in (reversed(names) if resume else names)}
    if silent:
        callbacks["grad_compress"].codec = ErrorFeedback(Silent())
    staged = in_stages(names)
    trainer = Trainer(
        Toy(samples=40, width=32, depth=3 if staged else 2, dropout=0.0 if staged else 0.1, dtype="float64"),
        {**callbacks, "early": early},
        adam if by_adam(names) else sgd,
        batch=4 * WORLD,
        accumulate=2,
        options=Options(
            max_steps=STEPS, log_every_steps=1, validate_every=3, run_dir=f"runs/{run}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=3, keep=3), check_replicas_every=1,
        ),
        data=DataOptions(workers=0, shuffle_shards=5, shuffle_window=4),
        place=replace(place, store=f"{place.store}-{run}"),
    )  # fmt: skip
    start = flat(trainer.module)
    trainer.fit()
    return {
        "start": start,
        "first": early.weights.get(first(names)),
        "early": early.weights,
        "weights": early.last,
        "moments": np.concatenate(
            [
                state["exp_avg" if by_adam(names) else "momentum_buffer"].numpy().ravel()
                for state in early.moments.values()
                if state  # with shard, of this rank's own parameters
            ]
        ),
        "validated": early.validated,
        "validation": trainer.validation,
    }


def train_all(place: Place, cases: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    results = []
    for names in cases:
        run = "+".join(names) or "plain"
        try:
            straight = train(place, names, run)
        except ConfigError as error:
            results.append({"refused": str(error)})
            continue
        resumed = train(place, names, f"{run}-resumed", f"ckpt/{run}/step-00000003")
        results.append({"straight": straight, "resumed": resumed, "left": groups_left()})
    return results


@pytest.fixture(scope="module")
def table(request, tmp_path_factory) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """What every rank gives for every case that is selected; the ranks are started once."""
    chosen = selected(request, "names")
    cases = [
        (),
        ("adamw",),
        *([("staged",), ("staged", "adamw")] if any(map(in_stages, chosen)) else []),
        *sorted({case for names in chosen for case in (names, without_overlap(names))} & set(CASES)),
    ]
    cases = list(dict.fromkeys(cases))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("contract"))
        by_rank = run_ranks(WORLD, train_all, cases, timeout_s=580)
        metrics = {path.parent.name: path.read_text().splitlines() for path in Path("runs").glob("*/metrics.jsonl")}
    table = dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    return {names: [{**rank, "metrics": metrics} for rank in ranks] for names, ranks in table.items()}


def named(names: tuple[str, ...], refusal: str) -> bool:
    return {name_of(row) for row in names} <= set(refusal.split())


@pytest.mark.parametrize("pair", sorted(REFUSED), ids="+".join)
def test_refused_by_both_names(pair):
    """`arrange` refuses before ranks start. On real ranks the Trainer refuses local_sgd+overlap, in the table."""
    with pytest.raises(ConfigError) as refusal:
        arrange({name_of(row): ALL[row]() for row in pair}, set())
    assert named(pair, str(refusal.value))


@pytest.mark.parametrize("names", params(CASES), ids="+".join)
def test_refused_or_kept(table, names):
    if names in REFUSED:
        assert {named(names, rank["refused"]) for rank in table[names]} == {True}
        return
    assert not [rank["refused"] for rank in table[names] if "refused" in rank]
    plain = table[reference(names)][0]["straight"]
    if set(PIPELINES) & set(names):
        held = [~np.isnan(rank["straight"]["weights"]) for rank in table[names]]
        assert (sum(own.astype(int) for own in held) == WORLD // STAGES).all()  # each parameter is in one stage
    for rank in table[names]:
        straight, resumed = rank["straight"], rank["resumed"]
        keeps_its_bound(names, straight, plain)
        for key in ("weights", "moments", "validated"):
            assert straight[key].tobytes() == resumed[key].tobytes(), key
        assert straight["validation"] == resumed["validation"]


def keeps_its_bound(names: tuple[str, ...], straight: dict[str, Any], plain: dict[str, Any]) -> None:
    bound = sum(BOUNDS.get(name, LOSSY) for name in names if not ALL[name]().exact)
    common = {**plain, "first": plain["early"][first(names)]}
    assert distance(straight, common, "first") <= max(bound, 1e-12)
    assert distance(straight, plain, "weights") <= max(3 * bound, 1e-12)  # errors feed on each other in 6 steps
    assert (distance(straight, plain, "weights") > 1e-9) == bool(bound)  # what is called lossy is at work
    for key in ("first", "weights"):
        assert cosine(straight, common, key) >= COSINE, key


def silent(place: Place, codecs: list[str]) -> list[dict[str, Any]]:
    runs = [((), False), *((("local_sgd", codec), True) for codec in codecs)]
    return [train(place, names, "+".join(names) or "plain", silent=silent) for names, silent in runs]


@pytest.mark.timeout(120)
def test_a_codec_whose_mean_is_zero_keeps_no_bound(tmp_path):
    codecs = ["topk", "dgc", "sign", "powersgd"]
    plain, *runs = run_ranks(WORLD, silent, codecs)[0]
    for codec, run in zip(codecs, runs, strict=True):
        assert np.allclose(run["first"], run["start"], rtol=0, atol=1e-12)
        with pytest.raises(AssertionError):
            keeps_its_bound(("local_sgd", codec), run, plain)
    keeps_its_bound((), plain, plain)


def without_overlap(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name != "overlap")


OVERLAPPED = [
    names for names in CASES if "overlap" in names and names not in REFUSED and without_overlap(names) in CASES
]


@pytest.mark.parametrize("names", params(OVERLAPPED), ids="+".join)
def test_overlap_changes_no_bits(table, names):
    for rank, other in zip(table[names], table[without_overlap(names)], strict=True):
        assert rank["straight"]["weights"].tobytes() == other["straight"]["weights"].tobytes()


@pytest.mark.parametrize("names", params(names for names in CASES if len(names) == 1), ids="+".join)
def test_a_run_lets_its_process_groups_go(table, names):
    assert [rank.get("left", 0) for rank in table[names]] == [0] * WORLD


def distance(one: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """Of two updates, relative in the L2 norm."""
    own = ~np.isnan(one[key])  # a stage has NaN in the place of other stages' parameters
    return float(np.linalg.norm((one[key] - other[key])[own]) / np.linalg.norm((other[key] - other["start"])[own]))


def cosine(one: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """Of two updates; 0 for one that is none."""
    own = ~np.isnan(one[key])
    moved, should = (one[key] - one["start"])[own], (other[key] - other["start"])[own]
    return float(moved @ should / max(np.linalg.norm(moved) * np.linalg.norm(should), 1e-30))


@pytest.mark.parametrize("names", params(names for names in CASES if "metrics_file" in names), ids="+".join)
def test_metrics_are_the_same_after_a_resume(table, names):
    metrics = table[names][0]["metrics"]
    straight, resumed = ([numbers(line) for line in metrics["+".join(names) + end]] for end in ("", "-resumed"))
    assert resumed == [line for line in straight if line["step"] > 3]
    assert len(resumed) == 4  # steps 4 to 6 and a validation


def numbers(line: str) -> dict[str, float]:
    return {k: v for k, v in json.loads(line).items() if k in ("step", "samples") or k.startswith(("train/", "val/"))}


@pytest.mark.parametrize("row", [names for names in CASES if names not in REFUSED], ids="+".join)
def test_the_order_in_the_config_means_nothing(row):
    assert list(arrange({name_of(n): ALL[n]() for n in row}, set())) == list(
        arrange({name_of(n): ALL[n]() for n in reversed(row)}, set())
    )


def test_a_conflict_with_a_setting_names_a_feature():
    """One that was renamed would be guarded against no more."""
    on = Options(clip_norm=1.0, precision="fp16", sync_batch_norm=True, ddp=DDPOptions(None, True, True, True))
    others = ({"precision": "fp8"}, {"precision": "bf16_params"}, {"master_weights": False})
    others += ({"clip_norm": None, "clip_value": 1.0},)
    each = (on, *(replace(on, **other) for other in others))
    features = set[str]().union(*(Plan.features(SimpleNamespace(options=options)) for options in each))
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
