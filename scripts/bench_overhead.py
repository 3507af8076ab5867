"""Measures what Echelon costs beside PyTorch itself: per step, under DDP, and until the first step.

    python scripts/bench_overhead.py [--quick] [--json FILE]      # pip install -e '.[peers]' adds the other trainers

Every loop lives in a thread of its own, and they take turns: one block of steps each, in an order that is reversed every
round. So a machine that slows down or speeds up does so for all of them, and set-up and end are not measured. A ratio is the
median, over rounds, of the ratio within the round; a time is the median over rounds.
"""

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import overhead_loops as loops
import torch
from bench_report import Goal, Row, at_most, installed, machine, parser, report
from overhead_loops import LOG_EVERY, MLP, TRANSFORMER, Task
from torch import Tensor

from trainer.launch import Place

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "lightning", "accelerate", "transformers", "pytorch-ignite")

# Name -> the loop, the package that it needs, and what it does beside training.
LOOPS: dict[str, tuple[Callable[..., None], str, str]] = {
    "bare loop": (loops.bare, "torch", "keeps the loss"),
    "bare loop, one parameter group": (loops.bare_in_one_group, "torch", "keeps the loss"),
    "Echelon": (loops.echelon, "torch", "gradient norm"),
    "Echelon, default observers": (loops.echelon_observed, "torch", "gradient norm; terminal, TensorBoard, metrics.jsonl, speed"),
    "Fabric": (loops.fabric, "lightning", "CSV file"),
    "ignite": (loops.ignite, "pytorch-ignite", "keeps the loss"),
    "Accelerate": (loops.accelerate, "accelerate", "keeps the loss"),
    "Hugging Face Trainer": (loops.hugging_face, "transformers", "keeps the loss; terminal"),
    "Lightning": (loops.lightning, "lightning", "CSV file"),
}


class Turns(threading.Thread):
    """One loop. Each `turn` lets it take `warm` batches, then those of a log interval, which are timed."""

    def __init__(self, train: Callable[..., None], task: Task, rounds: int, warm: int, folder: Path) -> None:
        super().__init__(daemon=True)
        torch.manual_seed(0)
        self.pool = [task.batch() for _ in range(64)]
        self.rounds, self.sizes = rounds, (warm, LOG_EVERY - warm % LOG_EVERY)
        self.train = partial(train, task, self, rounds * sum(self.sizes) + 1, folder)
        self.wall_us: list[float] = []  # of a step, one value a round
        self.cpu_us: list[float] = []  # of this thread
        self.error: Exception | None = None
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()
        self.turn()  # set-up

    def run(self) -> None:
        self.go.acquire()
        torch.set_num_threads(1)  # holds for the thread that says it
        try:
            self.train()
        except Exception as error:
            self.error = error
        self.done.release()

    def turn(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        warm, timed = self.sizes
        for _ in range(self.rounds):
            self._wait()
            yield from self._batches(warm)
            wall, cpu = time.perf_counter(), time.thread_time()
            yield from self._batches(timed)
            self.wall_us.append((time.perf_counter() - wall) / timed * 1e6)
            self.cpu_us.append((time.thread_time() - cpu) / timed * 1e6)
        self._wait()
        yield from self._batches(4)  # for the last step, and for loops that take batches ahead

    def _wait(self) -> None:
        self.done.release()
        self.go.acquire()

    def _batches(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.pool[i % len(self.pool)] for i in range(n))


def measure(trains: dict[str, Callable[..., None]], task: Task, rounds: int, warm: int) -> dict[str, Turns]:
    quiet = contextlib.redirect_stdout, contextlib.redirect_stderr
    with contextlib.ExitStack() as stack:
        folder, null = stack.enter_context(tempfile.TemporaryDirectory()), stack.enter_context(open(os.devnull, "w"))
        for redirect in quiet:
            stack.enter_context(redirect(null))
        runs = {name: Turns(train, task, rounds, warm, Path(folder)) for name, train in trains.items()}
        for n in range(rounds):
            for run in list(runs.values())[:: -1 if n % 2 else 1]:
                run.turn()
        for run in runs.values():
            run.turn()
            run.join()
    return runs


def table(part: str, runs: dict[str, Turns], base: str, does: dict[str, str]) -> list[Row]:
    def ratio(own: list[float], others: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(own, others, strict=True))

    return [
        {
            part: name,
            "us a step": statistics.median(run.wall_us),
            "ratio": ratio(run.wall_us, runs[base].wall_us),
            "CPU us a step": statistics.median(run.cpu_us),
            "CPU ratio": ratio(run.cpu_us, runs[base].cpu_us),
            f"every {LOG_EVERY} steps": does[name],
        }
        for name, run in runs.items()
    ]


def ddp_rank(rank: int, folder: str, rounds: int) -> list[Row]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = Place(rank, 2, rank, 2, f"{folder}/store", "benchmark")
    # Echelon first: it starts the process group that both use, and it ends it.
    trains = {"Echelon": partial(loops.echelon, place=place), "bare DDP": loops.bare_ddp}
    runs = measure(trains, TRANSFORMER, rounds, warm=10)
    return table("transformer, two ranks", runs, "bare DDP", {"Echelon": "gradient norm", "bare DDP": "keeps the loss"})


def ddp(rounds: int) -> list[Row]:
    """Rank 0's times."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, spawn) as pool:
        return list(pool.map(ddp_rank, range(2), [folder] * 2, [rounds] * 2))[0][::-1]


# What a process does until its first step is over; then it tells the time and ends.
CLOCK = """
import os, time
from trainer.callback import Callback

class Clock(Callback):
    def on_step_end(self, trainer):
        os.write(2, str(time.monotonic()).encode())
        os._exit(0)
"""
BARE = """
import os, time, torch
from toy_recipe import Toy
from torch.utils.data import default_collate

recipe = Toy()
model, data = recipe.model(), recipe.data("train")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
recipe.loss(model, default_collate([data[i] for i in range(12)])).backward()
optimizer.step()
optimizer.zero_grad()
os.write(2, str(time.monotonic()).encode())
os._exit(0)
"""
TOY = ["-m", "trainer.main", "--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=toy", "trainer.accelerator=cpu"]
TOY += ["+callbacks.clock._target_=clock.Clock", "trainer.allow_targets=[toy_recipe,clock]", "trainer.log_every_steps=50"]


def start_up(repeats: int) -> list[Row]:
    """Seconds from the start of a fresh process; the first round, which fills the caches of files, does not count."""
    commands = {
        "--help": ["-m", "trainer.main", "--help"],
        "import torch": ["-c", "import torch"],
        "import torch and a bare step": ["-c", BARE],
        "first step of the toy recipe": TOY,
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "clock.py").write_text(CLOCK)
        paths = os.pathsep.join([folder, str(ROOT), str(ROOT / "tests" / "toy")])
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        for _ in range(repeats + 1):
            for name, command in commands.items():
                began = time.monotonic()
                done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                seconds[name].append(float(done.stderr or time.monotonic()) - began)
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    base = median["import torch and a bare step"]
    return [{"start-up": name, "seconds": value, "ratio": value / base} for name, value in median.items()]


def goals(loop: list[Row], two_ranks: list[Row], start: list[Row]) -> list[Goal]:
    def of(rows: list[Row], name: str, column: str) -> Any:
        return next(row[column] for row in rows if name in row.values())

    return [
        at_most("a step without callbacks, times the bare loop", 1.10, of(loop, "Echelon", "ratio")),
        at_most("a step with the default observers, times the bare loop", 1.15, of(loop, "Echelon, default observers", "ratio")),
        at_most("a transformer step on two ranks, times bare DDP", 1.01, of(two_ranks, "Echelon", "ratio")),
        at_most("--help, seconds", 1.0, of(start, "--help", "seconds")),
        at_most("first step, times import torch and a bare step", 1.5, of(start, "first step of the toy recipe", "ratio")),
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, help="of each part, in place of what --quick decides")
    args = options.parse_args()
    warnings.simplefilter("ignore")  # of the other trainers, about settings that are meant
    about = machine(PACKAGES)
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ", end="\n\n")
    for name, (_, package, _) in LOOPS.items():
        if not installed(package):
            print(f"{name}: not measured, {package} is not installed (extra [peers])\n")
    here = {name: loop for name, loop in LOOPS.items() if installed(loop[1])}
    runs = measure({name: train for name, (train, _, _) in here.items()}, MLP, args.rounds or (20 if args.quick else 100), warm=50)
    loop = table("MLP, one process", runs, "bare loop", {name: does for name, (_, _, does) in here.items()})
    two_ranks = ddp(args.rounds or (6 if args.quick else 30))
    start = start_up(args.rounds or 5)
    report([loop, two_ranks, start], goals(loop, two_ranks, start), about, args.json)


if __name__ == "__main__":
    main()
