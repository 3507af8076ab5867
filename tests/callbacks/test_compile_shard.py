"""Compiled blocks whose parameters lie in rows on the ranks: the numbers, the graphs, and a resume."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch._dynamo as dynamo
from support.ranks import run_ranks
from support.sharded import Case, run
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.compile import Compile
from trainer.callbacks.ema import EMA
from trainer.callbacks.shard.callback import Shard
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")

WORLD = 3


class Watch(Callback):
    """The counts of each step, and the frames that Dynamo could not trace whole."""

    def __init__(self) -> None:
        self.counts: list[dict[str, float]] = []

    def on_step_end(self, trainer) -> None:
        self.counts.append({name: v for name, v in trainer.metrics.items() if name.startswith("compile/")})

    def on_fit_end(self, trainer) -> None:
        self.breaks = dict(dynamo.utils.counters["graph_break"])


def case(name: str, knobs: dict[str, Any] | None, shard: Shard, other: Callback | None, **options: Any) -> Case:
    callbacks: dict[str, Callback] = {"shard": shard, "ema": EMA(0.5), "watch": Watch()}
    callbacks |= {"activation_checkpoint": other} if other else {}
    callbacks |= {"compile": Compile(**knobs)} if knobs else {}
    return Case(callbacks, options, recipe=Toy(width=17, depth=3, dropout=0.1), steps=6, run=name)


def fit(place: Place, cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for i, each in enumerate(cases):
        dynamo.reset()
        dynamo.utils.counters.clear()
        watch: Any = each.callbacks["watch"]
        each = replace(each, callbacks={**each.callbacks, "watch": Shared(watch)})
        found.append(run(replace(place, store=f"{place.store}-{i}"), each) | vars(watch))
    return found


class Shared(Callback):
    """Calls another callback, of which a run makes no copy."""

    def __init__(self, other: Watch) -> None:
        self.other = other

    def __deepcopy__(self, memo: Any) -> "Shared":
        return self

    def on_step_end(self, trainer) -> None:
        self.other.on_step_end(trainer)

    def on_fit_end(self, trainer) -> None:
        self.other.on_fit_end(trainer)


EXACT = {"backend": "aot_eager"}
KINDS = [
    ("plain", Shard(3), None),
    ("recomputed", Shard(3), ActivationCheckpoint()),
    ("selective", Shard(3, reshard=False), ActivationCheckpoint(policy="selective")),
]


@pytest.mark.slow
def test_compiled_blocks_in_rows_have_the_bits_of_eager_ones_and_one_graph():
    """Recomputation is in the graph, the gathering of rows is around it."""
    pairs = [(case(f"{n}-eager", None, s, o), case(n, EXACT, s, o)) for n, s, o in KINDS]
    for rank in run_ranks(WORLD, fit, [each for pair in pairs for each in pair]):
        assert not any("refused" in each for each in rank), [each.get("refused") for each in rank]
        for eager, compiled in zip(rank[::2], rank[1::2], strict=True):
            for key in ("weights", "validated", "losses", "norms"):
                np.testing.assert_array_equal(eager[key], compiled[key], err_msg=key)
            assert eager["validation"] == compiled["validation"]
            # The average of the weights, which is validated, is not compiled.
            assert compiled["counts"] == [{"compile/graphs": 1, "compile/recompiles": 0}] * 6 and not compiled["breaks"]


@pytest.mark.slow
def test_in_bf16_compiled_blocks_in_rows_are_eagers_to_rounding_and_a_resume_has_the_same_bits():
    runs = [
        case("eager", None, Shard(3), None, precision="bf16"),
        case("compiled", EXACT, Shard(3), None, precision="bf16"),
        case("resumed", EXACT, Shard(3), None, precision="bf16", resume="ckpt/compiled/step-00000003"),
    ]
    for eager, compiled, resumed in run_ranks(WORLD, fit, runs):
        assert "refused" not in resumed, resumed
        assert 0 < np.abs(eager["weights"] - compiled["weights"]).max() < 1e-3
        np.testing.assert_array_equal(compiled["weights"], resumed["weights"])
        np.testing.assert_array_equal(compiled["validated"], resumed["validated"])
        assert compiled["losses"][3:] == resumed["losses"]


def test_a_whole_model_in_rows_is_refused_by_name_before_the_first_step():
    for rank in run_ranks(WORLD, fit, [case("whole", {**EXACT, "whole": True}, Shard(3), None)]):
        assert rank[0]["refused"].startswith(
            "ConfigError: callbacks.compile.whole=true: parameters are gathered block by block inside the model"
        )
        assert not rank[0]["counts"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor_compiles_blocks_in_rows_to_rounding_and_resumes_with_the_same_bits():
    knobs = {"fallback_random": True}
    runs = [
        case("eager", None, Shard(3), ActivationCheckpoint()),
        case("compiled", knobs, Shard(3), ActivationCheckpoint()),
        case("resumed", knobs, Shard(3), ActivationCheckpoint(), resume="ckpt/compiled/step-00000003"),
    ]
    for eager, compiled, resumed in run_ranks(WORLD, fit, runs, timeout_s=280):
        assert 0 < np.abs(eager["weights"] - compiled["weights"]).max() < 1e-6
        np.testing.assert_array_equal(compiled["weights"], resumed["weights"])
