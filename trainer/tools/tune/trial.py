"""Makes one short run of a config on one rank, and returns step times, losses and memory; nothing else is kept."""

import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.callback import Callback, Role
from trainer.comm.phases import Phase
from trainer.comm.ranks import Ranks
from trainer.data.batch import Step
from trainer.errors import ConfigError
from trainer.monitors.advice.callback import read
from trainer.process.environment import Place
from trainer.session import build_components
from trainer.trainer import Trainer

OWN = "tune"  # name of the callback that measures
PHASES = ("step", *(phase.name.lower() for phase in Phase))


class Over(Exception):
    """Ends a trial after its steps, without validation and checkpoint."""


class Stopwatch(Callback):
    """Times the steps of a trial, and ends it. The first `warm` steps are not timed."""

    role = Role.MEASURE

    def __init__(self, warm: int, steps: int) -> None:
        self.warm, self.steps = warm, steps
        self.ends: list[Any] = []  # of each step: seconds on a CPU, an event on a GPU
        self.sums: list[tuple[Tensor, int]] = []  # of each step: the loss times its items, the items
        self.waits: list[float] = []  # for data
        self.worked: list[float] = []  # of these, processor seconds
        # Of logged steps, by step_timer: the seconds of each phase, and the slowest rank's compute less the fastest's.
        self.phases, self.spreads = list[dict[str, float]](), list[float]()
        self.result: dict[str, Any] = {}

    def wrap_batches(self, trainer, steps: Iterator[Step]) -> Iterator[Step]:
        while True:
            began, busy = time.perf_counter(), time.process_time()
            try:
                step = next(steps)
            except StopIteration:
                return
            self.waits.append(time.perf_counter() - began)
            self.worked.append(time.process_time() - busy)
            yield step

    def on_fit_start(self, trainer) -> None:
        self.now: Callable[[], Any] = clock(trainer.device)

    def on_step_end(self, trainer) -> None:
        self.ends.append(self.now())
        self.sums.append(weigh(trainer.losses, trainer.data.weights))
        if "time/step" in trainer.metrics:
            self.phases.append({name: trainer.metrics.get(f"time/{name}", 0.0) for name in PHASES})
            self.spreads.append(trainer.metrics.get("time/spread", 0.0) * trainer.metrics["time/step"])
        last = trainer.step == trainer.plan.max_steps and len(self.ends) > self.warm  # of a run with fewer steps
        if last or len(self.ends) == self.warm + self.steps:
            trainer.emit("on_flush")  # what is deferred needs its peers
            self.result = self._collect(trainer.ranks, trainer.device, trainer.run_dir)
            self.result["precision"] = trainer.precision.label
            raise Over

    def _collect(self, ranks: Ranks, device: torch.device, run_dir: Path) -> dict[str, Any]:
        """Return what was measured; the losses are those of all ranks. A collective."""
        times = seconds_between(self.ends)[self.warm - 1 :]
        own = [[float(loss), items] for loss, items in self.sums]
        total = [[sum(part) for part in zip(*step)] for step in zip(*ranks.gather(own))]
        return {
            "times": times,
            "losses": [loss / items if items else None for loss, items in total],
            "data_s": statistics.mean(self.waits[self.warm :] or [0.0]),
            "memory_bytes": peak_bytes(device),
            "advice": advice(run_dir),
            "phases": mean_of(self.phases[1:]),  # the first logged one has the start
            "spread_s": statistics.mean(self.spreads[1:] or [0.0]),
        }


def weigh(losses: list[Tensor], weights: list[int]) -> tuple[Tensor, int]:
    """Return the sum of the losses times their items, and the items, without waiting for the device."""
    parts = [loss.detach().float() * weight for loss, weight in zip(losses, weights, strict=True)]
    return torch.stack([part.reshape(()) for part in parts]).sum() if parts else torch.zeros(()), sum(weights)


def clock(device: torch.device) -> Callable[[], Any]:
    """Return a function that records the time; on a GPU by CUDA events, without waiting."""
    if device.type != "cuda":
        return time.perf_counter

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    return event


def seconds_between(ends: list[Any]) -> list[float]:
    if isinstance(ends[0], float):
        return [end - before for before, end in itertools.pairwise(ends)]
    torch.cuda.synchronize()
    return [before.elapsed_time(end) / 1e3 for before, end in itertools.pairwise(ends)]


def peak_bytes(device: torch.device) -> float:
    """Return the peak memory: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def advice(run_dir: Path) -> list[dict[str, Any]]:
    """Return the findings of the run's advice: `name`, `text`, `config`, and the `rank` if it concerns one."""
    lines = read(run_dir / "advice.jsonl").values()
    return [{key: line.get(key) for key in ("name", "text", "rank", "config")} for line in lines]


def mean_of(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(each[name] for each in phases) for name in PHASES} if phases else {}


def run_trial(config: dict[str, Any], place: Place, warm: int, steps: int) -> dict[str, Any]:
    """Train `warm` and then `steps` steps of a config on this rank, and return what was measured."""
    components = build_components(config)
    watch = components["callbacks"][OWN] = Stopwatch(warm, steps)
    trainer = Trainer(**components, place=place, name=OWN)
    try:
        trainer.fit()
    except Over:
        trainer.close()
        return watch.result
    raise ends_early(watch)


def ends_early(watch: Stopwatch) -> ConfigError:
    text = f"the run ends after {len(watch.ends)} step(s), before one is timed"
    return ConfigError(f"tune.warm: {text}; give a smaller one, or a run with more steps")


def step_seconds(times: list[float], period: int) -> float:
    """Return the seconds of a step: the median over stretches of `period` steps, which are all alike."""
    stretches = [times[i : i + period] for i in range(0, len(times) - period + 1, period)]
    return statistics.median(statistics.mean(stretch) for stretch in stretches)
