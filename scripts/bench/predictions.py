"""Measures the cost model's predictions of single callbacks, before any trial corrects them, against trials by turns.

    python -m scripts.bench.predictions [--cells 'of 2 ranks'] [--quick] [--rounds 3] [--json FILE]

A cell is one of `scripts.bench.tune`'s, or has two ranks on each host. Machine and workload are measured once, as a
search does. Then each choice has a trial in each round; its step is the median of the rounds. Needs Linux, root and
iproute2. A cell takes about 10 minutes.
"""

import argparse
from pathlib import Path
from statistics import median

from scripts.bench.harness import Goal, Row, at_most, matching, parser
from scripts.bench.tune import STEPS, Cell, bench, make_config, say
from scripts.command import command
from trainer.cost.workload import Choice
from trainer.tools.tune.candidates import NOTHING, describe
from trainer.tools.tune.configs import merge, refusal
from trainer.tools.tune.journal import Journal
from trainer.tools.tune.options import TuneOptions
from trainer.tools.tune.team import Team, TrialFailed
from trainer.tools.tune.tuning import Tuning

CELLS = (Cell("1gbit", 2, "10M"), Cell("1gbit", 2, "30M"), Cell("1gbit", 2, "10M", 2))
CHOICES = (
    NOTHING,
    Choice({}, {"micro_batch": 16}),
    Choice({}, {"trainer.ddp.bucket_mib": 100.0}),
    Choice({"overlap": {}}, {}),
    Choice({"hierarchical": {}}, {}),
    Choice({"activation_checkpoint": {"policy": "selective"}}, {}),
    Choice({"activation_checkpoint": {}}, {}),
    *(Choice({"shard": {"stage": stage}}, {}) for stage in (1, 2, 3)),
    Choice({"shard": {"stage": 3, "reshard": False}}, {}),
    *(Choice({"pipeline": {"schedule": schedule}}, {}) for schedule in ("1f1b", "zero_bubble")),
    Choice({"optimizer_in_backward": {}}, {"micro_batch": 16}),
    Choice({"grad_compress": {"codec": "fp16"}}, {}),
    Choice({"local_sgd": {"every": 4}}, {}),
)


def measure(cell: Cell, team: Team, folder: Path, rounds: int) -> list[Row]:
    """Predict each choice that a run accepts, then measure all in turns."""
    config = make_config(cell, folder)
    options = TuneOptions(budget_s=3600.0, steps=STEPS[cell.rate], warm=1, lossy=True)
    tuning = Tuning(config, options, team, Journal(folder / "tuned.jsonl", []), lambda line: say(cell, line))
    model = tuning.measure()[0]
    accepted = [choice for choice in CHOICES if not refusal(merge(config, choice), cell.ranks)]
    times: list[list[float]] = [[] for _ in accepted]
    for number in range(1, rounds + 1):
        for choice, found in zip(accepted, times, strict=True):
            try:
                found.append(tuning.run_trial(choice)["step_s"])
            except TrialFailed as error:
                say(cell, f"round {number} {describe(choice)}: failed: {error}")
    pairs = zip(accepted, times, strict=True)
    return [row(cell, choice, model.predict(choice).step_s, found) for choice, found in pairs if found]


def row(cell: Cell, choice: Choice, predicted_s: float, times: list[float]) -> Row:
    step_s = median(times)
    name = describe(choice) if choice != NOTHING else "today's config"
    return {
        "part": str(cell), "choice": name, "predicted s": predicted_s, "measured s": step_s,
        "error, percent": 100 * (predicted_s / step_s - 1), "least s": min(times), "most s": max(times),
    }  # fmt: skip


def goals(rows: list[Row]) -> list[Goal]:
    return [at_most("median error of single callbacks, percent", 10, median(abs(r["error, percent"]) for r in rows))]


def main() -> int:
    made = parser("predictions", __doc__, "the first cell, one round: 4 minutes", "without it 3")
    made.add_argument("--cells", default="", metavar="PATTERN", help="a regular expression; without it all 3")
    made.add_argument("--rank", help=argparse.SUPPRESS)
    args = made.parse_args()
    cells = list(CELLS[:1]) if args.quick else matching("--cells", args.cells, CELLS)
    return bench(args, "predictions", cells, measure, goals, rounds=args.rounds or (1 if args.quick else 3))


if __name__ == "__main__":
    command(main)
