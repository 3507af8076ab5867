"""Measures unequal ranks: even shares of the batch and those of `hetero_batch`, on one machine's CPUs.

    python -m scripts.bench.hetero [--quick] [--rounds 3] [--json FILE]

Three ranks have 0.2, 0.4 and 1.0 of a core, so their speeds are about 1 : 2 : 5. Run it on two idle cores. A rank
sleeps after each micro-batch, in proportion to the CPU time that it has used.

A rank's own speed comes from a run of its own, with its part of the batch. All ranks have these runs at the same time.
A row's part is its speed over the sum of the own speeds of the same round.

In the last two rows the fastest rank has 0.4 of a core from a step on. Steps are timed from the twelfth after the
change on: after two measurements of four steps each, and three steps that were loaded before. The sum of the own speeds
is then that of the later cores. A round takes about four minutes.
"""

import statistics
import sys
import time
from dataclasses import dataclass, replace

from torch import Tensor, nn

from scripts.bench.harness import Goal, Report, Row, at_least, median_ratio, on_ranks, parser
from scripts.bench.squares import Squares, quiet
from scripts.command import command
from trainer.callback import Callback
from trainer.callbacks.hetero_batch.callback import HeteroBatch
from trainer.process.environment import Place

CORES, LATER = (0.2, 0.4, 1.0), (0.2, 0.4, 0.4)
BATCH, MICRO = 1152, 4
EVERY = 4  # steps between two measurements of `hetero_batch`
SETTLED = 2 * EVERY + 3  # steps until the shares have followed a change


@dataclass(frozen=True)
class Case:
    """A run, and how its ranks are held."""

    name: str
    batch: int
    timed: int  # the last steps
    cores: tuple[float, ...]
    later: tuple[float, ...] = ()  # from step `EVERY + 2` on
    hetero: bool = False
    alone: bool = False  # each rank has a run of its own, with its part of the batch
    tokens: int = 128
    width: int = 128

    @property
    def steps(self) -> int:
        """The steps of the run; those that are not timed let shares and caches settle."""
        return self.timed + (SETTLED if self.hetero else 2) + (EVERY + 2 if self.later else 0)


class Limit:
    """Holds this process to a part of a core: it sleeps for the CPU time that it has used."""

    def hold(self, cores: float) -> None:
        self.cores, self.used = cores, time.process_time()

    def sleep(self) -> None:
        time.sleep((time.process_time() - self.used) * (1 / self.cores - 1))
        self.used = time.process_time()


class Held(Squares):
    def __init__(self, case: Case, limit: Limit) -> None:
        super().__init__(case.width, 8, case.tokens, BATCH)
        self.limit = limit

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        self.limit.sleep()
        return super().loss(model, batch)


class Times(Callback):
    """Notes the end of each step, and changes the limit where the case says so."""

    def __init__(self, limit: Limit, later: float | None) -> None:
        self.limit, self.later = limit, later
        self.ends: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.ends.append(time.monotonic())
        if self.later and trainer.step == EVERY + 2:
            self.limit.hold(self.later)


def train(place: Place, case: Case, number: int, limit: Limit, run_dir: str) -> float:
    part = case.cores[number] / sum(case.cores)
    batch = MICRO * max(1, round(case.batch * part / MICRO)) if case.alone else case.batch
    times = Times(limit, case.later[number] if case.later else None)
    callbacks: dict[str, Callback] = {"times": times}
    if case.hetero:
        callbacks["hetero_batch"] = HeteroBatch(every=EVERY)
    trainer = quiet(Held(case, limit), callbacks, place, run_dir, batch, case.steps, micro_batch=MICRO)
    limit.hold(case.cores[number])
    trainer.fit()
    timed = times.ends[-case.timed - 1 :]
    return batch * case.timed / (timed[-1] - timed[0])


def rank(place: Place, rounds: int, timed: int) -> list[tuple[str, float]]:
    """Run the cases of each round as one of the ranks; return the samples per second of each run."""
    limit, found = Limit(), []
    imports = Case("imports", 24, 1, (1.0, 1.0, 1.0), hetero=True)
    for number, case in enumerate([imports, *(cases(timed) * rounds)]):
        own = Place() if case.alone else replace(place, store=f"{place.store}-{number}")
        run_dir = f"runs/{number}-{place.rank}" if case.alone else f"runs/{number}"
        found.append((case.name, train(own, case, place.rank, limit, run_dir)))
        if not place.rank:
            print(f"{case.name}: {found[-1][1]:.3g} samples/s of rank 0", file=sys.__stderr__, flush=True)
    return found[1:]


def cases(timed: int) -> list[Case]:
    """List a round: the own speeds with each limit, followed by the rows of the table that they belong to.

    Args:
        timed: Steps of a run that count.
    """
    few = -(-timed // 3)  # even shares take long
    return [
        Case("own", BATCH, timed, CORES, alone=True),
        Case("hetero_batch", BATCH, timed, CORES, hetero=True),
        Case("even shares", BATCH, few, CORES),
        Case("own, later", BATCH, timed, LATER, alone=True),
        Case("hetero_batch, one rank slows down", BATCH, timed, CORES, LATER, hetero=True),
        Case("even shares, one rank slows down", BATCH, few, CORES, LATER),
    ]


def table(speeds: dict[str, list[list[float]]]) -> tuple[list[Row], list[Goal]]:
    """Make the rows, of medians over rounds.

    Args:
        speeds: Of each case, a round's samples per second of each rank.
    """
    rows, goals = list[Row](), list[Goal]()
    part = f"samples per second, three ranks with {', '.join(map(str, CORES))} of a core"
    for name in (name for name in speeds if not name.startswith("own")):
        own = speeds["own, later" if "slows" in name else "own"]
        rows.append({
            "part": part, "shares": name, "samples/s": statistics.median(run[0] for run in speeds[name]),
            "own speeds": " + ".join(f"{statistics.median(each):.3g}" for each in zip(*own, strict=True)),
            "of their sum": median_ratio([run[0] for run in speeds[name]], map(sum, own)),
        })  # fmt: skip
        if name.startswith("hetero_batch"):
            goals.append(at_least(f"{name}: part of the sum of the own speeds", 0.92, rows[-1]["of their sum"]))
    return rows, goals


def main() -> None:
    words = "1 round of short runs: about 2 minutes", "of all cases; without it 3"
    args = parser("hetero", __doc__, *words).parse_args()
    rounds, timed = (1, 4) if args.quick else (args.rounds or 3, 12)
    with Report(args.json) as report:
        speeds: dict[str, list[list[float]]] = {}
        for runs in zip(*on_ranks(len(CORES), rank, rounds, timed), strict=True):
            speeds.setdefault(runs[0][0], []).append([speed for _, speed in runs])
        report.add(*table(speeds))


if __name__ == "__main__":
    command(main)
