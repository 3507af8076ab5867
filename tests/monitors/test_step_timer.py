"""Times of the test's own land in the phase that spends them; on real ranks, each wait lands on those who wait."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.onebit_adam.callback import OneBitAdam
from trainer.callbacks.optimizer_in_backward import OptimizerInBackward
from trainer.callbacks.overlap.callback import Overlap
from trainer.callbacks.pipeline.callback import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.comm.phases import Lap, running
from trainer.comm.reduce import Reduce
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.loggers.metrics_file import MetricsFile
from trainer.monitors.memory.callback import Memory
from trainer.monitors.step_timer import NAMES, StepTimer, metrics
from trainer.optim.factories import adamw
from trainer.process.environment import Place
from trainer.trainer import Trainer

NOW = [0.0]


def work(seconds: float) -> None:
    NOW[0] += seconds


def options(**others: Any) -> Options:
    checkpoint = CheckpointOptions(every_steps=others.pop("save", None), every_minutes=None)
    return Options(**{"run_dir": "run", "timeout_s": 60.0, "checkpoint": checkpoint, **others})


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/step_times.jsonl").read_text().splitlines()]


def parts(times: dict[str, float]) -> dict[str, float]:
    return {name: times[name] for name in NAMES if times[name]}


class Slow(Toy):
    """Spends time in each method that a step calls, and in its backward pass."""

    def data(self, split: str) -> Any:
        whole, slow = super().data(split), split == "train"

        class Data(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(whole)

            def __getitem__(self, i: int) -> Any:
                work(slow)
                return whole[i]

        return Data()

    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda module, args, output: Spend.apply(output))
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        work(2)
        return super().loss(model, batch)


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        work(3)
        return gradient


class Busy(Callback):
    """Spends time in its hooks."""

    role = Role.GUARD

    def wrap_optimizer(self, trainer, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(lambda *_: work(5))
        return optimizer

    def on_before_optimizer_step(self, trainer) -> None:
        work(7)

    def on_step_end(self, trainer) -> None:
        work(11)

    def on_flush(self, trainer) -> None:
        work(13)  # of the checkpoint, or of the validation, that asks for it

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        work(17)

    def state_dict(self) -> dict[str, Any]:
        work(19)
        return {}


@pytest.fixture
def timer(tmp_path) -> StepTimer:
    timer = StepTimer()
    timer.now = lambda: NOW[0]
    return timer


def test_each_second_is_in_the_phase_that_spends_it(timer: StepTimer) -> None:
    """12 samples a step in 2 micro-batches; a validation at step 2, a checkpoint at step 3; logged at steps 2 and 4.

    What follows a logged step is of the steps after it.
    """
    trainer = Trainer(
        Slow(), {"timer": timer, "busy": Busy()}, batch=12, accumulate=2, place=Place(), data=DataOptions(workers=0),
        options=options(max_steps=4, log_every_steps=2, validate_every=2, save=3),
    )  # fmt: skip
    trainer.fit()
    step = {"data": 12.0, "forward": 4.0, "backward": 6.0, "optimizer": 5.0, "callbacks": 18.0}
    first, second = lines()
    assert [(line["step"], line["steps"], len(line["ranks"])) for line in (first, second)] == [(2, 2, 1), (4, 2, 1)]
    # The first batch was loaded before the clock began, and step 2's callback comes after its numbers. After step 1 the
    # state of an own callback is tried.
    assert parts(first["ranks"][0]) == step | {"data": 6.0, "callbacks": 18.0 - 5.5, "checkpoint": 19 / 2}
    found = parts(second["ranks"][0])
    validation = 13 + 17 + 2 * 2  # 13 samples to validate are 2 calls of the loss of 2 seconds
    saved = 13 + 19
    assert found.pop("validation") >= validation / 2 and found.pop("checkpoint") == saved / 2
    assert found == step
    assert second["ranks"][0]["step"] == sum(parts(second["ranks"][0]).values())
    assert {name: trainer.last_metrics[f"time/{name}"] for name in NAMES} == {
        name: second["ranks"][0][name] for name in NAMES
    }
    assert json.loads(Path("run/summary.json").read_text())["time/optimizer"] == 5.0


SLEEP_S = 0.04
STEPS = 6


class Late(Toy):
    """The last rank is late with each of its forward passes."""

    def __init__(self, late: bool) -> None:
        super().__init__(depth=3)
        self.late = late

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        time.sleep(SLEEP_S * self.late)
        return super().loss(model, batch)


class Watch(Callback):
    """Takes the time of a run, before or after the timer by its name, and counts the exchanges of numbers."""

    role = Role.MEASURE

    def on_fit_start(self, trainer) -> None:
        self.began, self.read, self.gathers = time.perf_counter(), 0.0, 0
        gather = trainer.ranks.gather

        def counted(*args: Any) -> Any:
            self.gathers += 1
            return gather(*args)

        trainer.ranks.gather = counted  # pyright: ignore[reportAttributeAccessIssue]
        trainer.gathered.append((self._read, lambda values: {}))

    def _read(self) -> None:
        self.read = time.perf_counter()


def run(
    place: Place, callbacks: dict[str, Callback], recipe: Any = None, accumulate: int = 1
) -> tuple[float, float, dict[str, float]]:
    """Return the least and the most seconds between the first and the last reading of the clock, and the metrics."""
    torch.manual_seed(0)
    before, after = Watch(), Watch()
    trainer = Trainer(
        recipe or Late(place.rank == place.world - 1),
        {**callbacks, "before": before, "timer": StepTimer(), "watch": after}, adamw,
        batch=24, accumulate=accumulate, place=place, data=DataOptions(workers=0),
        options=options(max_steps=STEPS, log_every_steps=STEPS // 2),
    )  # fmt: skip
    trainer.fit()
    return before.read - after.began, after.read - before.began, trainer.last_metrics


CASES: dict[str, tuple[Callable[[], dict[str, Callback]], int]] = {
    "ddp": (dict, 1),
    "accumulation": (dict, 2),
    "overlap": (lambda: {"overlap": Overlap()}, 1),
    "optimizer_in_backward": (lambda: {"optimizer_in_backward": OptimizerInBackward()}, 1),
    "local_sgd": (lambda: {"local_sgd": LocalSGD(every=2)}, 1),
    "onebit_adam": (lambda: {"onebit_adam": OneBitAdam(warmup_steps=3)}, 1),
    "shard.1": (lambda: {"shard": Shard(1)}, 1),
    "shard.2": (lambda: {"shard": Shard(2)}, 2),
    "shard.3": (lambda: {"shard": Shard(3)}, 1),
    "pipeline": (lambda: {"pipeline": PipelineParallel(stages=3, schedule="1f1b")}, 4),
    "pipedream": (lambda: {"pipeline": PipelineParallel(stages=3, schedule="pipedream_2bw")}, 4),
    "hetero_batch": (lambda: {"hetero_batch": HeteroBatch(every=2)}, 1),
}
QUICK = ("overlap", "pipeline")  # in each run of the tests


def times_of(place: Place, case: str) -> tuple[float, float, dict[str, float]]:
    make, accumulate = CASES[case]
    return run(place, make(), accumulate=accumulate)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_ranks_that_wait_for_a_late_one_communicate(case: str, tmp_path) -> None:
    """The late rank computes. The parts are the time of the run, by readings just before and after the clock's."""
    found = run_ranks(3, times_of, case)
    late = SLEEP_S * CASES[case][1]
    ranks = [line["ranks"] for line in lines()]
    for rank, (least, most, _) in enumerate(found):
        whole = sum(STEPS // 2 * each[rank]["step"] for each in ranks)
        assert STEPS * late / 2 < least - 1e-6 <= whole <= most + 1e-6
    for each in ranks:
        for times in each:
            assert sum(parts(times).values()) == pytest.approx(times["step"], abs=1e-7)
    waiting, waited, slow = ranks[-1]
    assert min(waiting["communication"], waited["communication"]) > slow["communication"]
    assert slow["forward"] > max(late, waiting["forward"], waited["forward"])
    assert found[0][2]["time/slowest_rank"] == 2 and found[0][2]["time/spread"] > 0


def late_rows(place: Place) -> None:
    """The wait for rows, which on a GPU is one between streams, takes a while."""
    wait = FSDPParamGroup.wait_for_unshard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimer, "now", staticmethod(lambda: NOW[0]))
        patch.setattr(FSDPParamGroup, "wait_for_unshard", lambda self: (work(1), wait(self))[1])
        run(place, {"shard": Shard(3)}, Late(False))


def test_a_wait_for_the_rows_of_stage_3_is_communication(tmp_path) -> None:
    """Three blocks and the rest of the model wait forward, and the blocks wait backward again."""
    run_ranks(3, late_rows)
    for times in lines()[-1]["ranks"]:
        assert parts(times).keys() == {"communication"} and times["communication"] >= 7


class Wire(Callback):
    """A slow link: each reduction takes a while, in the thread of the Reduce chain."""

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        def slow(flat: Tensor, bucket: Any) -> Tensor:
            time.sleep(SLEEP_S)
            return reduce(flat, bucket)

        return slow


def over_a_slow_link(place: Place, callbacks: dict[str, Callback]) -> None:
    """Each forward pass takes longer than a reduction."""
    late = Late(True)
    run(place, {"wire": Wire(), **callbacks}, late)


@pytest.mark.slow
def test_a_reduction_counts_as_far_as_the_step_waits_for_it(tmp_path, monkeypatch) -> None:
    """DDP waits at the end of its backward pass, in C++; overlap reduces beside the next forward pass."""
    found = []
    for callbacks in ({}, {"overlap": Overlap()}):
        run_dir = tmp_path / str(len(callbacks))
        run_dir.mkdir()
        monkeypatch.chdir(run_dir)
        run_ranks(2, over_a_slow_link, callbacks)
        found.append(lines()[-1]["ranks"])
    for exposed, hidden in zip(*found, strict=True):
        assert exposed["communication"] > hidden["communication"] + SLEEP_S / 2
        assert exposed["communication"] >= SLEEP_S > 2 * exposed["backward"]
        assert exposed["forward"] >= SLEEP_S and hidden["forward"] >= SLEEP_S


def test_a_data_worker_that_is_late_is_waited_for(timer: StepTimer, monkeypatch) -> None:
    get = _MultiProcessingDataLoaderIter._get_data  # waits for the worker's batch
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_get_data", lambda self: (work(2), get(self))[1])
    trainer = Trainer(
        Toy(), {"timer": timer}, batch=12, place=Place(), data=DataOptions(workers=1),
        options=options(max_steps=8, log_every_steps=4),
    )  # fmt: skip
    trainer.fit()
    assert parts(lines()[-1]["ranks"][0]) == {"data": 2.0}


def gathers(place: Place) -> list[int]:
    counts = []
    for name, callbacks in (("without", {}), ("with", {"timer": StepTimer(), "memory": Memory()})):
        watch = Watch()
        trainer = Trainer(
            Toy(), {**callbacks, "watch": watch}, batch=12, place=Place(), data=DataOptions(workers=0),
            options=options(max_steps=4, log_every_steps=2, run_dir=f"{name}{place.rank}"),
        )  # fmt: skip
        trainer.fit()
        counts.append(watch.gathers)
    return counts


def test_the_numbers_take_no_exchange_of_their_own(tmp_path) -> None:
    for without, with_timer in run_ranks(2, gathers):
        assert without == with_timer >= 2


class Stop(Callback):
    """Ends the run as a crash would."""

    role = Role.OBSERVE

    def on_step_end(self, trainer) -> None:
        if trainer.step == 5:
            raise KeyboardInterrupt


def test_a_resume_cuts_what_was_written_after_its_checkpoint(timer: StepTimer) -> None:
    """Stopped at step 5, of which 3 are in the checkpoint. The clock ends with each run."""

    def fit(callbacks: dict[str, Callback], resume: str | None) -> None:
        Trainer(
            Toy(), callbacks, batch=12, place=Place(), data=DataOptions(workers=0),
            options=options(max_steps=6, log_every_steps=1, save=3, resume=resume),
        ).fit()  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        fit({"timer": timer, "stop": Stop()}, None)
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5] and running.clock is None
    fit({"timer": StepTimer()}, "auto")
    assert [(line["step"], line["steps"]) for line in lines()] == [(step, 1) for step in range(1, 7)]
    assert running.clock is None


def test_a_run_that_ends_between_two_logged_steps_tells_of_its_last_steps(timer: StepTimer) -> None:
    class Enough(Callback):
        def on_step_end(self, trainer) -> None:
            if trainer.step == 5:
                trainer.stop("enough")

    trainer = Trainer(
        Slow(), {"timer": timer, "enough": Enough(), "file": MetricsFile()}, batch=12, place=Place(),
        data=DataOptions(workers=0), options=options(max_steps=9, log_every_steps=3),
    )  # fmt: skip
    trainer.fit()
    assert [(line["step"], line["steps"]) for line in lines()] == [(3, 3), (5, 2)]
    assert json.loads(Path("run/summary.json").read_text())["time/backward"] == 3.0


def test_means_and_the_slowest_rank() -> None:
    """Both ranks take 10 seconds; rank 1 computes for 8 of them, and rank 0 for 4."""
    first = [1.0, 0, 1, 2, 6, 0, 0, 0, 0]
    second = [1.0, 0, 3, 4, 2, 0, 0, 0, 0]
    found = metrics([first, second])
    assert found == {
        "time/step": 10, "time/data": 1, "time/upload": 0, "time/forward": 2, "time/backward": 3,
        "time/communication": 4, "time/optimizer": 0, "time/callbacks": 0, "time/checkpoint": 0, "time/validation": 0,
        "time/data_max": 1, "time/communication_min": 2, "time/slowest_rank": 1, "time/spread": (7 - 3) / 10,
    }  # fmt: skip
    assert list(found)[1:-4] == [f"time/{name}" for name in NAMES]
    assert list(metrics([first])) == list(found)[:-4]  # one rank is neither slow nor fast


def test_a_wait_for_data_makes_no_rank_slow() -> None:
    """Both ranks lack data. One waits 9 seconds for its batch, and the other 5 for its own and 4 for the first rank."""
    found = metrics([[5.0, 0, 1, 0, 4, 0, 0, 0, 0], [9.0, 0, 1, 0, 0, 0, 0, 0, 0]])
    assert found["time/spread"] == 0 and found["time/communication_min"] == 0
    assert found["time/data"] == 7 and found["time/data_max"] == 9


def test_a_device_that_is_behind_gives_its_numbers_later() -> None:
    """One rank's device has not got there, so no rank counts the interval yet."""
    timer, trainer = StepTimer(), SimpleNamespace(step=0)
    timer.trainer, timer.step, timer.next = trainer, 0, Lap()  # pyright: ignore[reportAttributeAccessIssue]
    trainer.step = 2
    assert timer._combine([[2.0] * 9, []]) == {}
    trainer.step = 4
    assert timer._combine([[2.0] * 9, [2.0] * 9])["time/step"] == 9 * 2.0 / 4
