"""echelon lr_find [OPTIONS] [ARGUMENTS OF THE RUN]: looks for a learning rate by a range test.

    echelon lr_find recipe=bert_tiny
    echelon lr_find --max 1 --png rates.png recipe=bert_large trainer.devices=8

The run trains a few steps from its first weights. Its optimizer.lr grows by the same factor each step (Smith 2017,
arXiv:1506.01186). Factors of groups and of schedule.lr_scaling hold. The test ends where the loss rises to 4 times its
least. It suggests the rate of the steepest descent, and a tenth of the rate at the least loss. Checkpoints and folders
of runs stay untouched.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

from trainer.errors import ConfigError, require
from trainer.files import no_folders_if_refused, write_json
from trainer.optim.schedule import Rate, Schedule
from trainer.process.arguments import ArgumentParser
from trainer.process.environment import Place
from trainer.process.exit import run_guarded
from trainer.run_dir import make_parent
from trainer.tools.measure.plot import require_matplotlib
from trainer.tools.tune.start import one_job, prepare, run_team

SMOOTHING = 0.9  # weight of the smoothed loss before, in that of a step
DIVERGED = 4.0  # times the least smoothed loss, where the test ends
LEAST_STEPS = 10
WINDOW = 1 / 4  # of the steps, over which the descent is measured
LEAST_LOSSES = 3  # which make a slope
ROWS = 10  # of the table on the terminal


def main() -> int:
    parser = ArgumentParser(
        "echelon lr_find", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--min", type=float, default=1e-7, metavar="RATE", help="the first rate (default: 1e-7)")
    parser.add_argument("--max", type=float, default=10.0, metavar="RATE", help="the last rate (default: 10)")
    parser.add_argument("--steps", type=int, default=100, help="steps from the first to the last (default: 100)")
    parser.add_argument("--limit-s", type=float, default=3600.0, metavar="S", help="seconds at most (default: 3600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes rates, losses and suggestions")
    parser.add_argument("--png", type=Path, metavar="FILE", help="writes the curve; needs matplotlib")
    options, words = parser.parse_known_args()
    return run_guarded(lambda: find(options, words))


@no_folders_if_refused()
def find(options: argparse.Namespace, words: list[str]) -> int:
    refuse(options)
    job = one_job(words, "lr_find")
    if job is None:
        return 0
    if not (lr := job.config["optimizer"].get("lr")):
        raise ConfigError(f"optimizer.lr={lr}: the rates are multiples of it; give one above 0, or another optimizer")
    prepare()
    from trainer.tools.tune.configs import of_trial

    def lead(team: Any) -> int:
        from trainer.tools.tune.team import TrialFailed

        config = of_trial(job.config, team.folder, 1, options.limit_s, options.steps)
        config["trainer"] |= {"max_steps": options.steps, "max_epochs": None, "resume": None}
        task = {"config": config, "folder": str(team.folder), "min": options.min, "max": options.max}
        try:
            show(team.run(task, options.limit_s)[0]["losses"], options)
        except TrialFailed as error:
            raise ConfigError(f"the run does not train: {error}") from None
        return 0

    return run_team(job.config, sweep, lead)


def refuse(options: argparse.Namespace) -> None:
    require("--min", options.min, above=0)
    require("--steps", options.steps, at_least=LEAST_STEPS)
    require("--limit-s", options.limit_s, above=0)
    if not options.min < options.max < math.inf:
        raise ConfigError(f"--max={options.max:g}: must be above --min={options.min:g}, and finite")
    for name in ("json", "png"):
        if path := getattr(options, name):
            make_parent(f"--{name}", path)
    require_matplotlib(options.png)


def sweep(task: dict[str, Any], place: Place) -> dict[str, Any]:
    """Train with growing rates on this rank. Return each step's mean loss over all ranks, as JSON values."""
    import torch

    from trainer.callback import Callback, Role
    from trainer.session import build_components
    from trainer.tools.tune.trial import Over, weigh
    from trainer.trainer import Trainer

    class Growing(Schedule):
        def resolve(self, total: int | None, batch: int, epoch_samples: int | None) -> Rate:
            factor = schedule.factor_of_batch(batch) if isinstance(schedule, Schedule) else 1.0
            return GrowingRate(factor / task["config"]["optimizer"]["lr"], steps, task["min"], task["max"])

    class Watch(Callback):
        """Records the losses, and ends the run. The sums are equal on all ranks, so all end together."""

        role = Role.MEASURE

        def on_step_end(self, trainer) -> None:
            total, items = weigh(trainer.losses, trainer.data.weights)
            sums = torch.tensor(trainer.ranks.gather([float(total), items]), dtype=torch.float64).sum(0)
            losses.append(float(sums[0] / sums[1]) if sums[1] else math.nan)
            if len(losses) == steps or diverged(losses):
                trainer.emit("on_flush")  # what is deferred needs its peers
                raise Over

    losses, steps = list[float](), task["config"]["trainer"]["max_steps"]
    components = build_components(task["config"])
    schedule, components["schedule"] = components["schedule"], Growing()
    components["callbacks"]["lr_find"] = Watch()
    trainer = Trainer(**components, place=place, name="lr_find")
    try:
        trainer.fit()
    except Over:
        trainer.close()
    return {"losses": [loss if math.isfinite(loss) else None for loss in losses]}


@dataclass(frozen=True)
class GrowingRate(Rate):
    """`optimizer.lr` grows from `least` to `most`; factors of groups and of the batch still apply."""

    factor: float  # from `optimizer.lr` to the factor on the rates
    steps: int
    least: float
    most: float

    def __call__(self, step: int) -> float:
        return self.factor * rate(step, self.steps, self.least, self.most)


def rate(step: int, steps: int, least: float, most: float) -> float:
    """Return the rate of a step: `least` at step 0, `most` at the last one."""
    return least * (most / least) ** (step / (steps - 1))


def smooth(losses: Sequence[float]) -> list[float]:
    """Return exponential moving averages, corrected for their start (Kingma and Ba 2014, arXiv:1412.6980)."""
    found, mean = list[float](), 0.0
    for number, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        found.append(mean / (1 - SMOOTHING**number))
    return found


def diverged(losses: Sequence[float]) -> bool:
    """Return whether the last loss is not finite, or its average is above `DIVERGED` times the least one."""
    if not math.isfinite(losses[-1]):
        return True
    smoothed = smooth(losses)
    return len(losses) >= LEAST_STEPS and smoothed[-1] > max(DIVERGED * min(smoothed), smoothed[0])


def suggest(rates: Sequence[float], losses: Sequence[float]) -> dict[str, float]:
    """Return the rate where the loss falls fastest, and a tenth of the rate at its least smoothed value.

    The fall is the slope of a line over `WINDOW` of the steps, because single losses are noisy.
    """
    half = max(1, int(len(losses) * WINDOW / 2))
    smoothed = smooth(losses)
    least = min(range(half, len(losses)), key=smoothed.__getitem__)
    width = range(2 * half + 1)
    descents = {
        i: linear_regression(width, losses[i - half : i + half + 1]).slope
        for i in range(half, min(least, len(losses) - half))
    }
    if not descents or min(descents.values()) >= 0:
        raise ConfigError(
            f"the loss does not fall between the rates {rates[0]:g} and {rates[-1]:g}; "
            "give other --min and --max, more --steps, or look for a mistake in the recipe"
        )
    return {"steepest": rates[min(descents, key=descents.__getitem__)], "tenth": rates[least] / 10}


def show(losses: list[float | None], options: argparse.Namespace) -> None:
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < min(LEAST_LOSSES, len(losses)):
        last = rate(len(losses) - 1, options.steps, options.min, options.max)
        raise ConfigError(
            f"the loss is not finite at step {len(losses)}, at a rate of {last:.3g}; "
            "look for a mistake in the recipe, or give a smaller --min"
        )
    rates = [rate(step, options.steps, options.min, options.max) for step in range(len(finite))]
    found, smoothed = suggest(rates, finite), smooth(finite)
    print(f"{'rate':>10}  {'smoothed loss':>14}")
    every = max(1, len(rates) // ROWS)
    for number in range(every - 1, len(rates), every):
        print(f"{rates[number]:>10.3g}  {smoothed[number]:>14.6g}")
    if len(losses) < options.steps or len(finite) < len(losses):
        print(f"ended at {rates[-1]:.3g}, step {len(losses)} of {options.steps}: the loss had grown too large")
    print(f"steepest descent             optimizer.lr={found['steepest']:.2g}")
    print(f"a tenth of the least loss's  optimizer.lr={found['tenth']:.2g}")
    if options.json:
        write_json(options.json, {"rates": rates, "losses": finite, "smoothed": smoothed, **found})
    if options.png:
        draw(rates, finite, smoothed, found, options.png)


def draw(rates: list[float], losses: list[float], smoothed: list[float], found: dict[str, float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(rates, losses, ".", markersize=3, label="loss")
    axes.plot(rates, smoothed, label="smoothed")
    for (name, value), style in zip(found.items(), ("--", ":"), strict=True):
        axes.axvline(value, linestyle=style, color="grey", label=f"{name}: {value:.2g}")
    axes.set(xlabel="learning rate", ylabel="loss", xscale="log")
    axes.set_ylim(top=min(max(losses), 2 * losses[0]))
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
