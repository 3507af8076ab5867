"""Measures what Echelon costs beside PyTorch itself: per step, under DDP, and until the first step.

    python scripts/bench_overhead.py [--quick] [--json FILE]      # pip install -e '.[peers]' adds the other trainers

Every loop lives in a thread of its own, and they take turns: one block of steps each, in an order that is turned round every
round. So a machine that slows down does so for all of them, and neither set-up nor the end of a run is measured. A time is
the median over rounds; a ratio is the median of the ratios within each round.
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

import overhead_loops as loops
import torch
from bench_report import Goal, Row, at_most, installed, machine, parser, report
from overhead_loops import LOG_EVERY, MLP, TRANSFORMER, Task
from torch import Tensor

from trainer.launch import Place

ROOT = Path(__file__).parents[1]
TOY = ROOT / "tests" / "toy"
Train = Callable[..., None]

# Name -> the loop, the packages that it needs, and what it does with a logged step.
LOOPS: dict[str, tuple[Train, tuple[str, ...], str]] = {
    "bare loop": (loops.bare, (), "keeps the loss"),
    "bare loop, one parameter group": (loops.bare_in_one_group, (), "keeps the loss"),
    "Echelon": (loops.echelon, (), "keeps loss and gradient norm"),
    "Echelon, default observers": (loops.echelon_observed, (), "terminal, log, metrics.jsonl, TensorBoard, speed"),
    "Fabric": (loops.fabric, ("lightning",), "CSV file"),
    "ignite": (loops.ignite, ("pytorch-ignite",), "keeps the loss"),
    "Accelerate": (loops.accelerate, ("accelerate",), "keeps the loss"),
    "Hugging Face Trainer": (loops.hugging_face, ("transformers", "accelerate"), "terminal"),
    "Lightning": (loops.lightning, ("lightning",), "CSV file"),
}
PACKAGES = ("torch", *dict.fromkeys(package for _, packages, _ in LOOPS.values() for package in packages))


class Turns(threading.Thread):
    """One loop, and the batches that it trains on. In a `turn` it takes `warm` of them, and then as many as there are up to
    the next multiple of the log interval, which are timed: always with one logged step.
    """

    def __init__(self, train: Train, task: Task, rounds: int, warm: int, folder: Path) -> None:
        super().__init__(daemon=True)
        torch.manual_seed(0)
        self.pool = [task.batch() for _ in range(64)]
        self.rounds, self.warm, self.timed = rounds, warm, LOG_EVERY - warm % LOG_EVERY
        self.train = partial(train, task, self, rounds * (self.warm + self.timed) + 1, folder)
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
        for _ in range(self.rounds):
            self._wait()
            yield from self._batches(self.warm)
            wall, cpu = time.perf_counter(), time.thread_time()
            yield from self._batches(self.timed)
            self.wall_us.append((time.perf_counter() - wall) / self.timed * 1e6)
            self.cpu_us.append((time.thread_time() - cpu) / self.timed * 1e6)
        self._wait()
        yield from self._batches(4)  # the last step, and what a loop takes ahead

    def _wait(self) -> None:
        self.done.release()
        self.go.acquire()

    def _batches(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.pool[i % len(self.pool)] for i in range(n))


def measure(trains: dict[str, Train], task: Task, rounds: int, warm: int) -> dict[str, Turns]:
    with tempfile.TemporaryDirectory() as folder, silence():
        runs = {name: Turns(train, task, rounds, warm, Path(folder)) for name, train in trains.items()}
        backwards = list(runs.values())[::-1]
        for n in range(rounds):
            for run in backwards if n % 2 else runs.values():
                run.turn()
        for run in backwards:  # who started a process group first ends it last
            run.turn()
            run.join()
    return runs


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What the loops print is part of what they cost, but nobody reads it."""
    with contextlib.ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(null))
        stack.enter_context(contextlib.redirect_stderr(null))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def table(part: str, runs: dict[str, Turns], base: str, does: dict[str, str]) -> list[Row]:
    return [
        {
            "part": part,
            "loop": name,
            "us a step": statistics.median(run.wall_us),
            "ratio": median_ratio(run.wall_us, runs[base].wall_us),
            "CPU us a step": statistics.median(run.cpu_us),
            "CPU ratio": median_ratio(run.cpu_us, runs[base].cpu_us),
            "a logged step": does[name],
        }
        for name, run in runs.items()
    ]


def median_ratio(own: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def one_process(rounds: int) -> list[Row]:
    here = {name: loop for name, loop in LOOPS.items() if all(map(installed, loop[1]))}
    for name in LOOPS.keys() - here.keys():
        print(f"{name}: not measured, needs {' and '.join(LOOPS[name][1])} (extra [peers])\n")
    runs = measure({name: train for name, (train, _, _) in here.items()}, MLP, rounds, warm=50)
    part = f"MLP 64-64-10, batch 32, SGD, one process, one thread; {rounds} rounds of 50 steps"
    return table(part, runs, "bare loop", {name: does for name, (_, _, does) in here.items()})


def two_ranks(rounds: int) -> list[Row]:
    """Rank 0's times."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, spawn) as pool:
        return list(pool.map(one_of_two, range(2), [folder] * 2, [rounds] * 2))[0]


def one_of_two(rank: int, folder: str, rounds: int) -> list[Row]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Echelon first: it starts the process group that both use.
    trains = {"Echelon": partial(loops.echelon, place=Place(rank, 2, rank, 2, f"{folder}/store", "benchmark"))}
    runs = measure({**trains, "bare DDP": loops.bare_ddp}, TRANSFORMER, rounds, warm=10)
    part = f"transformer, AdamW, two gloo ranks of one thread; {rounds} rounds of 40 steps"
    does = {"Echelon": "keeps loss and gradient norm", "bare DDP": "keeps the loss"}
    return table(part, runs, "bare DDP", does)[::-1]


# Both processes end when their first step is over, and tell the time.
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
ECHELON = ["-m", "trainer.main", "--config-dir", str(TOY / "conf"), "recipe=toy", "trainer.accelerator=cpu"]
ECHELON += [
    "trainer.log_every_steps=50",
    "+callbacks.clock._target_=clock.Clock",
    "trainer.allow_targets=[toy_recipe,clock]",
]
PROCESSES = {
    "--help": ["-m", "trainer.main", "--help"],
    "import torch, a bare step": ["-c", BARE],
    "Echelon, the toy's first step": ECHELON,
}


def start_up(rounds: int) -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in PROCESSES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "clock.py").write_text(CLOCK)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(ROOT), str(TOY)]), "OMP_NUM_THREADS": "1"}
        for _ in range(rounds):
            for name, command in PROCESSES.items():
                began = time.monotonic()
                done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(done.stderr)
                seconds[name].append(float(done.stderr or time.monotonic()) - began)
    part, base = f"a fresh process; {rounds} rounds", seconds["import torch, a bare step"]
    return [
        {"part": part, "process": name, "seconds": statistics.median(own), "ratio": median_ratio(own, base)}
        for name, own in seconds.items()
    ]


def goals(loop: list[Row], ddp: list[Row], start: list[Row]) -> list[Goal]:
    ratio = {row["loop"]: row["ratio"] for row in loop}
    shown, _, first = start
    return [
        at_most("step without callbacks, times the bare loop", 1.10, ratio["Echelon"]),
        at_most("step with the default observers, times the bare loop", 1.15, ratio["Echelon, default observers"]),
        at_most("transformer step on two ranks, times bare DDP", 1.01, ddp[-1]["ratio"]),
        at_most("--help, seconds", 1.0, shown["seconds"]),
        at_most("first step, times import torch and a bare step", 1.5, first["ratio"]),
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, help="of each part, whatever --quick says")
    args = options.parse_args()
    about = machine(PACKAGES)
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ", end="\n\n")
    loop = one_process(args.rounds or (20 if args.quick else 100))
    ddp = two_ranks(args.rounds or (5 if args.quick else 30))
    start = start_up(args.rounds or 5)
    report([loop, ddp, start], goals(loop, ddp, start), about, args.json)


if __name__ == "__main__":
    main()
