"""Unequal shares of the batch: the numbers of even ones, by the speeds that a clock of the test's own shows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.callbacks import CHANGES, CODECS, name_of
from support.ranks import run_ranks
from support.steps import Steps, bits
from test_extension_points import Sharded
from torch import Tensor, nn
from toy_recipe import Points, Toy

from trainer.callback import Callback
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # the contract's rows are in the default run

WORLD, BATCH, STEPS = 3, 24, 12
NOW = [0.0]  # seconds of this process's clock, which computing alone moves
COSTS = (1.0, 2.0, 5.0)  # seconds that the ranks take for a sample


PLENTY = (99, 99, 99)  # samples of a micro-batch that the ranks hold


class Holes(Points):
    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i in (17, 40, 41):
            raise DataError(f"{i}.png: is no image")
        return super().__getitem__(i)


class Unequal(Toy):
    """Each rank's clock moves by its cost of a sample; from a step on, by others."""

    step = 0

    def __init__(
        self, costs: tuple[float, ...] = COSTS, later: tuple[float, ...] = (), holes: bool = False,
        holds: tuple[int, ...] = PLENTY,
    ) -> None:  # fmt: skip
        super().__init__(dtype="float64")
        self.costs, self.later, self.holes, self.holds = costs, later, holes, holds
        self.fitted: list[int] = []  # samples of each pass that fit
        self.failed: list[int] = []

    def data(self, split: str) -> Any:
        return Holes(96, torch.float64) if self.holes and split == "train" else super().data(split)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        costs = self.later if self.later and self.step >= 4 else self.costs
        rank = dist.get_rank() if dist.is_initialized() else 0
        NOW[0] += len(batch["x"]) * costs[rank]
        if torch.is_grad_enabled():
            (self.failed if len(batch["x"]) > self.holds[rank] else self.fitted).append(len(batch["x"]))
            if len(batch["x"]) > self.holds[rank]:
                raise torch.OutOfMemoryError("injected")
        return super().loss(model, batch)


def hetero(**knobs: Any) -> HeteroBatch:
    callback = HeteroBatch(**knobs)
    callback.now = lambda: NOW[0]
    return callback


def train(
    place: Place, name: str, knobs: dict[str, Any] | None, recipe: Toy | None = None, steps: int = STEPS,
    resume: str | None = None, workers: int = 0, run_dir: str = "", save: int = 3, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    watch = Steps()
    callbacks: dict[str, Callback] = {"watch": watch} | more.pop("callbacks", {})
    if knobs is not None:
        callbacks["mine"] = hetero(**knobs)
    options = {"clip_norm": 1.0, **more}
    recipe = recipe or Unequal()
    trainer = Trainer(
        recipe, callbacks, adamw, batch=BATCH, accumulate=2,
        options=Options(
            max_steps=steps, log_every_steps=1, validate_every=6, run_dir=run_dir or f"runs/{name}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=save, keep=99), check_replicas_every=1, timeout_s=30.0, **options,
        ),
        data=DataOptions(workers=workers, shuffle_shards=5, shuffle_window=4, max_bad=0.5),
        place=replace(place, store=f"{place.store}-{name}"),
    )  # fmt: skip
    trainer.fit()
    passes = {"fitted": recipe.fitted, "failed": recipe.failed} if isinstance(recipe, Unequal) else {}
    return {"steps": watch.steps, "validation": trainer.validation, **passes}


def several(place: Place, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train(place, name, **arguments) for name, arguments in cases]


def by_case(cases: list[tuple[str, dict[str, Any]]], world: int = WORLD) -> dict[str, list[dict[str, Any]]]:
    """What each rank gives, for each case."""
    return dict(zip([name for name, _ in cases], zip(*run_ranks(world, several, cases), strict=True), strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All in one folder, so that a resume can follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("hetero"))
        measured = {"every": 2, "smoothing": 0.0}
        slows = Unequal(later=(8.0, 2.0, 5.0))
        holed = Unequal(holes=True)
        yield by_case(
            [
                ("plain", {"knobs": None}),
                ("1:1:1", {"knobs": {"shares": [1.0, 1.0, 1.0]}}),
                ("1:2:5", {"knobs": {"shares": [1.0, 2.0, 5.0]}}),
                ("1:1:10", {"knobs": {"shares": [1.0, 1.0, 10.0]}}),
                ("measured", {"knobs": measured}),
                ("equal", {"knobs": measured, "recipe": Unequal(costs=(2.0, 2.0, 2.0))}),
                ("slows", {"knobs": measured, "recipe": slows}),
                ("workers", {"knobs": measured, "recipe": Unequal(later=(8.0, 2.0, 5.0)), "workers": 2}),
                ("holes", {"knobs": None, "recipe": holed}),
                ("unequal holes", {"knobs": measured, "recipe": holed}),
                ("caps", {"knobs": {**measured, "max_micro": [7, 2, 1]}}),
                ("little", {"knobs": measured, "recipe": Unequal(holds=(3, 99, 1))}),
                (
                    "little, slows",
                    {"knobs": measured, "recipe": Unequal(later=(8.0, 2.0, 5.0), holds=(3, 99, 1)), "save": 1},
                ),
                ("little, fixed", {"knobs": {"shares": [1.0, 2.0, 5.0]}, "recipe": Unequal(holds=(99, 99, 3))}),
                ("grows", {"knobs": {**measured, "max_micro": 24}, "recipe": Unequal(holds=(11, 5, 99))}),
                ("resumed", {"knobs": {"shares": [1.0, 2.0, 5.0]}, "resume": "ckpt/1:2:5/step-00000006"}),
                # Its ranks have other speeds now.
                (
                    "repeated",
                    {"knobs": measured, "resume": "ckpt/slows/step-00000006", "run_dir": "runs/slows",
                     "recipe": Unequal(costs=(3.0, 1.0, 1.0))},
                ),
                # Its ranks have more memory now.
                (
                    "little, repeated",
                    {"knobs": measured, "resume": "ckpt/little, slows/step-00000006", "run_dir": "runs/little, slows"},
                ),
                (
                    "little, from the start",
                    {"knobs": measured, "resume": "ckpt/little, slows/step-00000001", "run_dir": "runs/little, slows"},
                ),
                (
                    "without the file",
                    {"knobs": measured, "resume": "ckpt/measured/step-00000006", "run_dir": "runs/copy"},
                ),
            ]
        )  # fmt: skip


def sizes(ranks: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The ranks' samples, step by step."""
    return list(zip(*([len(step["refs"]) for step in rank["steps"]] for rank in ranks), strict=True))


def samples(ranks: list[dict[str, Any]], step: int) -> list[tuple[int, ...]]:
    return sorted(ref for rank in ranks for ref in rank["steps"][step]["refs"])


LITTLE = ["little", "little, slows", "little, fixed", "grows"]
UNEQUAL = ["1:2:5", "1:1:10", "measured", "slows", "workers", "caps", *LITTLE]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_shares_give_the_numbers_of_even_ones(runs, name):
    """In double precision: the bound on the loss is far below 1e-6."""
    for step, plain in enumerate(runs["plain"][0]["steps"]):
        assert len(bits(runs[name])[step]) == 1
        for rank in runs[name]:
            assert abs(rank["steps"][step]["loss"] - plain["loss"]) < 1e-12
            assert abs(rank["steps"][step]["norm"] - plain["norm"]) < 1e-12
        assert samples(runs[name], step) == samples(runs["plain"], step)
    for key, value in runs["plain"][0]["validation"].items():
        assert runs[name][0]["validation"][key] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("name", ["1:1:1", "equal"])
def test_even_shares_give_the_bits_of_plain_training(runs, name):
    for rank, plain in zip(runs[name], runs["plain"], strict=True):
        assert rank["steps"] == plain["steps"] and rank["validation"] == plain["validation"]


def test_fixed_shares_hold_from_the_first_step(runs):
    assert set(sizes(runs["1:2:5"])) == {(3, 6, 15)} and set(sizes(runs["1:1:10"])) == {(2, 2, 20)}
    assert runs["1:2:5"][2]["steps"][0]["micros"] == 4  # of at most 4 samples, as without the callback


def test_shares_follow_the_speeds_of_the_rehearsal_as_soon_as_steps_are_not_loaded(runs):
    """1 : 1/2 : 1/5 of 24. Without workers, the rank looks two steps ahead."""
    assert sizes(runs["measured"]) == [(8, 8, 8)] * 2 + [(15, 7, 2)] * (STEPS - 2)


def test_shares_follow_a_rank_that_slows_down(runs):
    """From step 5 on its cost is 8. The steps 5 and 6 show it, and the shares hold from step 8 on."""
    assert sizes(runs["slows"]) == [(8, 8, 8)] * 2 + [(15, 7, 2)] * 5 + [(3, 15, 6)] * 5


def test_new_shares_wait_until_no_rank_has_loaded_their_steps(runs):
    """Two workers of the last rank load several of its steps ahead, which have one micro-batch each."""
    assert list(dict.fromkeys(sizes(runs["workers"]))) == [(8, 8, 8), (15, 7, 2)]
    lines = [json.loads(line) for line in Path("runs/workers/splits.jsonl").read_text().splitlines()]
    assert lines[-1]["shares"] == [3, 15, 6]
    assert lines[0]["position"] >= 3 * BATCH
    assert all(line["position"] >= line["samples"] + 4 * BATCH for line in lines[-3:])


def test_a_rank_has_as_many_micro_batches_as_its_memory_wants(runs):
    first, last = ([rank["steps"][step]["micros"] for rank in runs["caps"]] for step in (0, -1))
    assert first == [2, 4, 8] and last == [3, 4, 2]


@pytest.mark.parametrize(
    ("name", "held"),
    [("little", (3, 4, 1)), ("little, slows", (3, 4, 1)), ("little, fixed", (3, 4, 3)), ("grows", (11, 5, 22))],
)
def test_no_micro_batch_is_larger_than_what_its_rank_holds(runs, name, held):
    """It is measured once, before the first step; no later pass runs out of memory, whatever the shares."""
    for line in Path(f"runs/{name}/splits.jsonl").read_text().splitlines():
        assert tuple(json.loads(line)["held"]) == held
    for rank, largest in zip(runs[name], held, strict=True):
        assert max(rank["fitted"]) <= largest and len(rank["failed"]) <= 4
        assert all(-(-len(step["refs"]) // step["micros"]) <= largest for step in rank["steps"][3:])


def test_shares_follow_the_speeds_where_memory_is_short_too(runs):
    assert sizes(runs["little"]) == sizes(runs["measured"])
    assert sizes(runs["little, slows"]) == sizes(runs["slows"])
    assert [rank["steps"][-1]["micros"] for rank in runs["little, slows"]] == [1, 4, 6]  # 3, 15 and 6 samples
    assert [rank["steps"][-1]["micros"] for rank in runs["grows"]] == [2, 2, 1]  # 15, 7 and 2 samples


def test_a_resume_repeats_what_memory_has_decided(runs):
    for rank, straight in zip(runs["little, repeated"], runs["little, slows"], strict=True):
        assert rank["steps"] == straight["steps"][6:] and not rank["failed"]
    for rank, straight in zip(runs["little, from the start"], runs["little, slows"], strict=True):
        assert rank["steps"] == straight["steps"][1:]


def test_damaged_samples_are_left_out(runs):
    for step, plain in enumerate(runs["holes"][0]["steps"]):
        for rank in runs["unequal holes"]:
            assert abs(rank["steps"][step]["loss"] - plain["loss"]) < 1e-12
    lines = [
        sorted(Path(f"runs/{name}/quarantine.jsonl").read_text().splitlines()) for name in ("holes", "unequal holes")
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 3 * STEPS * BATCH // 96


def test_a_resume_repeats_the_bits(runs):
    for rank, straight in zip(runs["resumed"], runs["1:2:5"], strict=True):
        assert rank["steps"] == straight["steps"][6:] and rank["validation"] == straight["validation"]


def test_a_resume_repeats_the_decisions_after_its_checkpoint(runs):
    """Up to where the interrupted run came; what its ranks are measured at now counts later."""
    assert len(set(sizes(runs["repeated"]))) == 2
    for rank, straight in zip(runs["repeated"], runs["slows"], strict=True):
        assert rank["steps"] == straight["steps"][6:] and rank["validation"] == straight["validation"]


def test_without_the_file_a_resume_has_the_decisions_of_its_checkpoint(runs):
    assert sizes(runs["without the file"])[:2] == sizes(runs["measured"])[6:8]
    for step in range(6):
        assert samples(runs["without the file"], step) == samples(runs["plain"], 6 + step)


def test_the_file_has_each_decision(runs):
    """One at each measurement, so that a resume knows what was left as it was."""
    lines = [json.loads(line) for line in Path("runs/slows/splits.jsonl").read_text().splitlines()]
    assert [line["samples"] for line in lines] == [0, *(BATCH * step for step in range(2, STEPS + 1, 2))]
    assert lines[0]["shares"] == [15, 7, 2] and lines[-1]["shares"] == [3, 15, 6]
    assert lines[-1]["speeds"] == pytest.approx([1 / 8, 1 / 2, 1 / 5])


def other_world(place: Place) -> dict[str, Any]:
    return train(
        place, "less", {"every": 2, "smoothing": 0.0}, resume="ckpt/measured/step-00000006", run_dir="runs/less"
    )


def test_another_number_of_ranks_begins_with_even_shares(runs):
    ranks = run_ranks(2, other_world)
    assert sizes(ranks) == [(12, 12)] * 2 + [(16, 8)] * 4
    for step in range(6):
        assert samples(ranks, step) == samples(runs["plain"], 6 + step)


def with_others(place: Place, rows: list[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    found = []
    for row in rows:
        table = {**CHANGES, **CODECS}
        for knobs in (None, {"shares": [1.0, 2.0, 5.0]}):
            more = {"clip_norm": None} if row == "overlap" else {}
            try:
                callbacks = {name_of(row): table[row]()}
                found.append(
                    (row, train(place, f"{row} {bool(knobs)}", knobs, callbacks=callbacks, steps=4, **more)["steps"])
                )
            except ConfigError as error:
                found.append((row, str(error)))
    return found


EXACT = ["activation_checkpoint", "bucket", "ema", "hierarchical", "nan_guard"]


@pytest.mark.timeout(400)
def test_unequal_shares_with_other_callbacks(tmp_path):
    rows = [*EXACT, "bf16", "powersgd", "overlap", "local_sgd", "onebit_adam"]
    ranks = run_ranks(WORLD, with_others, rows, timeout_s=300)
    for index, row in enumerate(rows):
        even, unequal = ([rank[2 * index + i][1] for rank in ranks] for i in (0, 1))
        if row in ("overlap", "local_sgd", "onebit_adam"):
            assert all("mine and" in text or "and mine" in text for text in unequal)
            continue
        bound = 1e-12 if row in EXACT else 0.05
        for step in range(4):
            assert len({rank[step]["weights"] for rank in unequal}) == 1
            assert abs(unequal[0][step]["loss"] - even[0][step]["loss"]) < bound


class Stream(Toy):
    def data(self, split: str) -> Any:
        points = Points(4, torch.float32)
        batch = {key: torch.stack([points[i][key] for i in range(4)]) for key in points[0]}
        return iter(lambda: batch, None) if split == "train" else super().data(split)


SHORT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"holds": (99, 0, 99)}, {},
        "ConfigError: callbacks.hetero_batch: a single sample does not fit into the memory of rank 1;",
    ),
    (
        {"holds": (99, 3, 99)}, {"ddp": DDPOptions(find_unused_parameters=True)},
        "ConfigError: callbacks.hetero_batch: micro-batches of [4, 4, 4] samples do not fit into memory, and "
        "find_unused_parameters lets the first steps have no other; set callbacks.hetero_batch.max_micro=[4, 3, 4]",
    ),
    ({"holds": (99, 3, 99)}, {"ddp": DDPOptions(static_graph=True)}, "OutOfMemoryError: injected"),
]  # fmt: skip


def too_little(place: Place, number: int) -> str:
    recipe, options, _ = SHORT[number]
    try:
        train(place, "little", {}, Unequal(**recipe), steps=2, **options)
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("number", range(len(SHORT)))
def test_too_little_memory_ends_the_run_before_the_first_step(tmp_path, number):
    """With a static graph nothing is measured, and the log says so."""
    assert run_ranks(WORLD, too_little, number)[1].startswith(SHORT[number][2])
    log = Path("runs/little/logs/rank0.log")  # a refused run that has logged nothing leaves no folder
    said = "static_graph allows no pass without a reduction, so no memory is measured"
    assert (log.exists() and said in log.read_text()) == (number == 2)


def refused(place: Place) -> list[str]:
    messages = []
    one: dict[str, Callback] = {"mine": hetero()}
    cases: list[tuple[Toy, dict[str, Callback], int]] = [
        (Toy(), {**one, "shard": Sharded()}, 24),
        (Stream(), one, 12),
        (Toy(), {"mine": hetero(shares=[1.0, 2.0])}, 24),
        (Toy(), {"mine": hetero(max_micro=[1, 2, 3, 4])}, 24),
    ]
    for number, (recipe, callbacks, batch) in enumerate(cases):
        try:
            Trainer(
                recipe, callbacks, batch=batch, options=Options(max_steps=1), data=DataOptions(workers=0),
                place=replace(place, store=f"{place.store}{number}"),
            )  # fmt: skip
        except ConfigError as error:
            messages.append(str(error))
        dist.destroy_process_group() if dist.is_initialized() else None
    return messages


def test_ranks_whose_passes_are_in_lockstep_and_data_that_cuts_itself_are_refused(tmp_path):
    for messages in run_ranks(WORLD, refused):
        lockstep, iterable, shares, caps = messages
        assert "every rank must run the same number; leave hetero_batch or the sharding out" in lockstep
        assert "is an iterable of batches, whose size is fixed" in iterable
        assert "callbacks.hetero_batch.shares=[1.0, 2.0]: has 2 values; give one for each of 3 rank(s)" in shares
        assert "callbacks.hetero_batch.max_micro=[1, 2, 3, 4]: has 4 values" in caps


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"every": 0}, "every=0: must be at least 1"),
        ({"smoothing": 1.0}, "smoothing=1.0: must be less than 1"),
        ({"smoothing": -0.1}, "smoothing=-0.1: must be at least 0"),
        ({"min_share": 0.0}, "min_share=0.0: must be more than 0"),
        ({"min_share": 1.5}, "min_share=1.5: must be less than 1"),
        ({"max_micro": 0}, "max_micro=0: must be at least 1"),
        ({"max_micro": [2, 0]}, r"max_micro\.1=0: must be at least 1"),
        ({"shares": [1.0, 0.0]}, r"shares\.1=0.0: must be more than 0"),
        ({"shares": []}, r"shares=\[\]: is empty"),
    ],
)
def test_a_knob_out_of_range_is_refused(knobs, message):
    with pytest.raises(ConfigError, match=rf"callbacks\.hetero_batch\.{message}"):
        HeteroBatch(**knobs)


def test_one_rank_trains_and_saves_as_without_it(tmp_path):
    options = Options(max_steps=1, checkpoint=CheckpointOptions(every_steps=1))
    trainer = Trainer(Toy(), {"mine": HeteroBatch()}, batch=4, options=options, data=DataOptions(workers=0))
    trainer.fit()
    assert trainer.checkpoint is not None
