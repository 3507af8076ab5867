"""Findings of real runs whose numbers are given: said once, after two logged steps, and again at the end."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.runs import make
from toy_recipe import Points, Toy

from trainer.callback import Callback, Role
from trainer.callbacks.compile import Compile
from trainer.config.options import CheckpointOptions
from trainer.monitors.advice import callback
from trainer.monitors.advice.callback import Advice
from trainer.monitors.memory.advice import Use
from trainer.monitors.step_timer import StepTimer
from trainer.process import cgroup
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")

SLOW = {"time/step": 1.0, "time/data_max": 0.2}
TEXT = "steps wait for data for 20% of their time, more than 5%"


class Gives(Callback):
    """Numbers of the logged steps, by step."""

    role = Role.MEASURE

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def on_step_end(self, trainer) -> None:
        if trainer.metrics:
            trainer.metrics |= self.numbers(trainer.step)


def run(numbers: Any, **options: Any) -> Any:
    callbacks = {"advice": Advice(), "gives": Gives(numbers), **options.pop("callbacks", {})}
    trainer = make(callbacks=callbacks, **{"log_every_steps": 1, "max_steps": 5, **options})
    trainer.fit()
    return trainer


def lines() -> list[dict[str, Any]]:
    path = Path("runs/r/advice.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def said(messages: list[str]) -> list[str]:
    return [text for text in messages if text.startswith("advice")]


def test_a_finding_is_said_once_and_at_the_end(messages):
    run(lambda step: SLOW)
    workers = lines()[0]["config"]
    assert lines() == [
        {"step": 3, "name": "data_wait", "value": 0.2, "limit": 0.05, "text": TEXT, "config": workers, "rank": None}
    ]  # the first logged step is not judged
    assert workers == f"data.workers={min(2, callback.facts(fake()).cores)}"
    assert said(messages) == [f"advice: {TEXT}; try {workers}", f"advice      {TEXT}; try {workers}"]
    at = [i for i, text in enumerate(messages) if text.startswith(("advice", "checkpoint "))]
    assert messages[at[1]].startswith("checkpoint ") and len(at) == 3  # after the summary


def fake() -> Any:
    place = SimpleNamespace(local_world=1)
    return SimpleNamespace(
        plan=SimpleNamespace(data=SimpleNamespace(workers=0, prefetch=2), micro=4, accumulate=1),
        options=SimpleNamespace(checkpoint=CheckpointOptions(every_steps=1, every_minutes=None)), batch=4,
        ranks=SimpleNamespace(place=place), device=torch.device("cpu"), callbacks={}, world=1,
        strategy=SimpleNamespace(data_world=1), precision=SimpleNamespace(name="fp32"), parameters=[],
    )  # fmt: skip


@pytest.mark.parametrize(("slow", "step"), [({2, 3}, 3), ({2, 4, 5}, 5), ({2, 4}, None), ({1, 2}, None), (set(), None)])
def test_a_finding_holds_for_two_judged_steps_in_a_row(slow, step):
    run(lambda now: SLOW if now in slow else {})
    assert [line["step"] for line in lines()] == ([step] if step else [])


def test_the_slowest_rank_must_be_the_same():
    run(lambda step: {"time/spread": 0.5, "time/slowest_rank": (0, 0, 1, 2, 2)[step - 1]})
    assert [(line["step"], line["text"][:6]) for line in lines()] == [(5, "rank 2")]


@pytest.mark.parametrize(("mean", "said_at"), [(0.93, [5]), (0.5, [3])])
def test_an_idle_gpu_must_be_the_same_while_the_others_are_busy(mean, said_at):
    """Of many GPUs one may always pause."""
    idle = {"gpu/utilisation": mean, "gpu/utilisation_min": 0.5}
    run(lambda step: {**idle, "gpu/idlest_rank": (9, 5, 40, 7, 7)[step - 1]})
    assert [line["step"] for line in lines() if line["name"] == "utilisation"] == said_at


def test_nothing_is_said_without_numbers_or_between_logged_steps(messages):
    run(lambda step: {})
    run(lambda step: SLOW, log_every_steps=3, run_dir="runs/other")
    assert lines() == [] and said(messages) == [] and not Path("runs/other/advice.jsonl").exists()


def test_steps_that_compile_are_not_judged_by_their_times():
    """Recompilations are."""
    graphs = (1, 2, 2, 3, 3)
    run(lambda step: {**SLOW, "compile/graphs": graphs[step - 1], "compile/recompiles": graphs[step - 1] - 1.0})
    assert [(line["step"], line["name"]) for line in lines()] == [(3, "recompiles")]


def test_a_real_graph_that_is_cut(messages):
    import torch._dynamo

    torch._dynamo.utils.counters["graph_break"]["of a test"] += 1
    try:
        run(lambda step: {}, callbacks={"compile": Compile(backend="eager")})
        run(lambda step: {}, run_dir="runs/other")
    finally:
        del torch._dynamo.utils.counters["graph_break"]["of a test"]
    assert [line["name"] for line in lines()] == ["graph_breaks"] and not Path("runs/other/advice.jsonl").exists()


def test_checkpoints_count_over_all_steps_that_are_judged():
    """A stall of 0.1 s every second step, of 1 s."""
    run(lambda step: {"time/step": 1.0, "time/checkpoint": 0.1 * (step % 2)}, max_steps=9)
    (line,) = lines()
    assert (line["step"], line["name"]) == (6, "checkpoint")  # steps 3 and 5 have stalled
    assert line["value"] == pytest.approx(0.2 / 5) and line["config"] == "trainer.checkpoint.every=auto"


def test_checkpoints_that_take_little_of_all_steps():
    run(lambda step: {"time/step": 1.0, "time/checkpoint": 0.1 * (step % 4 == 0)}, max_steps=12)
    assert lines() == []


def test_a_resume_does_not_repeat_what_was_said(messages):
    """The last line may be a part, and a line may be anybody's."""
    run(lambda step: SLOW, checkpoint={"keep": 9})
    with Path("runs/r/advice.jsonl").open("a") as file:
        file.write('[1]\n{"name": 3}\n{"step": 9, "na')
    messages.clear()
    more = {"gpu/utilisation_spread": 0.5}
    run(lambda step: {**SLOW, **more}, resume="ckpt/r/step-00000002", max_steps=8, accept=["callbacks"])
    new = [text for text in said(messages) if text.startswith("advice: ")]
    assert len(new) == 1 and "swings" in new[0]
    assert [text[:25] for text in said(messages)[1:]] == ["advice      steps wait fo", "advice      the GPU's uti"]


def test_the_end_repeats_a_few(messages):
    run(lambda step: {
        **SLOW, "time/forward": 0.1, "time/communication_min": 0.3, "time/spread": 0.5,
        "gpu/utilisation_min": 0.5, "gpu/utilisation_spread": 0.5, "perf/memory_skew": 0.5, "perf/peak_rss_gib": 9.0,
    })  # fmt: skip
    end = [text for text in said(messages) if text.startswith("advice   ")]
    assert len(lines()) == 6 and len(end) == 6 and end[-1] == "advice      1 more in runs/r/advice.jsonl"


NOW = [0.0]


@pytest.fixture
def clock(monkeypatch):
    """Steps take the times of the test's own."""
    monkeypatch.setattr(StepTimer, "now", staticmethod(lambda: NOW[0]))


class Late(Points):
    """Samples that take a second each."""

    def __getitem__(self, i: int) -> Any:
        NOW[0] += 1
        return super().__getitem__(i)


class Waits(Toy):
    def data(self, split: str) -> Any:
        return Late(96, torch.float32) if split == "train" else super().data(split)


def test_a_wait_for_data(clock):
    make(Waits(), {"advice": Advice(), "timer": StepTimer()}, max_steps=5, log_every_steps=1).fit()
    (line,) = (line for line in lines() if line["name"] == "data_wait")
    assert line["step"] == 3 and line["value"] == 1 and line["config"].startswith("data.")


class SlowRank(Toy):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        NOW[0] += self.rank == 1
        return super().loss(model, batch)


def slow_rank(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimer, "now", staticmethod(lambda: NOW[0]))
        callbacks = {"advice": Advice(), "timer": StepTimer()}
        make(SlowRank(place.rank), callbacks, place=place, max_steps=5, log_every_steps=1).fit()


def test_a_rank_that_is_slow():
    run_ranks(3, slow_rank)
    found = {line["name"]: line for line in lines()}
    assert found["straggler"]["text"].startswith("rank 1 computes longer than the fastest rank by ")


class Raises(Callback):
    def on_step_end(self, trainer) -> None:
        if trainer.step == 4:
            raise ZeroDivisionError


def test_an_error_is_the_last_word(messages):
    with pytest.raises(ZeroDivisionError):
        run(lambda step: SLOW, callbacks={"raises": Raises()})
    assert len(said(messages)) == 1 and len(lines()) == 1


def ranks(place: Place) -> tuple[list[str], Any]:
    advice = Advice()
    trainer = make(
        callbacks={"advice": advice, "gives": Gives(lambda step: SLOW)}, place=place, log_every_steps=1, max_steps=5
    )
    trainer.fit()
    return list(advice.said), advice.file is not None


def test_rank_0_alone_advises():
    assert run_ranks(3, ranks) == [(["data_wait"], True), ([], False), ([], False)]
    assert len(lines()) == 1


def test_attention_is_watched_in_the_first_pass_alone():
    """A run on a GPU without torch.compile."""
    q = torch.randn(1, 2, 3, 4)

    def attend(data: Any, total: Any) -> list[torch.Tensor]:
        return [torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)]

    trainer: Any = SimpleNamespace(rank=0, device=torch.device("cuda", 0), callbacks={})
    advice, other = Advice(), Advice()
    passes = advice.wrap_forward_backward(trainer, attend)
    for _ in range(3):
        passes(None, None)  # pyright: ignore[reportArgumentType]
    assert advice.kernels["math_attention"] == 1
    for key, value in (("rank", 1), ("device", torch.device("cpu")), ("callbacks", {"c": Compile()})):
        trainer = SimpleNamespace(rank=0, device=torch.device("cuda", 0), callbacks={}) if key else None
        setattr(trainer, key, value)
        assert other.wrap_forward_backward(trainer, attend) is attend


@pytest.mark.parametrize(
    ("use", "samples"),
    [
        (Use(10, 1, 1, 2, False, 100), 57),  # 4 x (90 - 4) / 6
        (Use(10, 1, 1, 2, False, 0), 0),
        (Use(4, 1, 1, 2, False, 100), 0),
    ],
)
def test_the_micro_batch_that_fits(use, samples, monkeypatch):
    monkeypatch.setattr(callback, "count", lambda trainer, most: use)
    assert callback.fits(fake()) == samples


def test_cores_are_those_of_the_mask_the_node_and_the_container(monkeypatch):
    limits: list[cgroup.Limit | None] = [cgroup.Limit(6.0, Path()), cgroup.Limit(0.5, Path()), None]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(cgroup, "cores", lambda *_: limits[0])
    assert [callback.cores_of(ranks) for ranks in (1, 2, 4)] == [6, 3, 1]
    del limits[0]
    assert callback.cores_of(1) == 1
    del limits[0]
    assert [callback.cores_of(ranks) for ranks in (1, 3)] == [16, 5]


def test_facts_of_a_run():
    trainer = make(callbacks={"advice": Advice()}, clip_norm=1.0)
    run, fixed = callback.facts(trainer), callback.facts(trainer).fixed_interval
    trainer.options = replace(trainer.options, checkpoint=replace(trainer.options.checkpoint, every="auto"))
    assert fixed and not callback.facts(trainer).fixed_interval and not run.skips
    trainer.options = replace(trainer.options, checkpoint=replace(trainer.options.checkpoint, when_busy="skip"))
    assert callback.facts(trainer).skips
    trainer.close()
    assert (run.world, run.nodes, run.data_world, run.cuda, run.micro, run.accumulate) == (1, 1, 1, False, 12, 1)
    assert (run.workers, run.profiles) == (0, False)
    assert run.accepts("hetero_batch") and not run.accepts("overlap")  # which has no norm of all gradients
    assert 1 <= run.cores <= (os.cpu_count() or 1)
