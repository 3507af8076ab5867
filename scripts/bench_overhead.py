"""Measures what Echelon costs beside PyTorch itself: per step, under DDP, and until the first step.

    python scripts/bench_overhead.py [--quick] [--json FILE]      # pip install -e '.[peers]' adds the other trainers

A time is the median over rounds. The bare loop is there twice; a ratio is the median of the ratios, within each round,
to the mean of the two. How far these two are from 1.00 is how far the others may be off. All run on a GPU if there is
one, and two ranks on two.
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import overhead_loops as loops
import torch
from bench_report import Goal, Row, at_most, installed, machine, parser, report
from overhead_loops import MLP, TRANSFORMER
from overhead_turns import Train, Turns, measure

from trainer.process.environment import Place

ROOT = Path(__file__).parents[1]
TOY = ROOT / "tests" / "toy"

# Name -> the loop, the packages that it needs, and what it does with a logged step.
LOOPS: dict[str, tuple[Train, tuple[str, ...], str]] = {
    "bare loop": (loops.bare, (), "keeps the loss"),
    "bare loop, again": (loops.bare, (), "keeps the loss"),
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


def table(part: str, runs: dict[str, Turns], base: str, does: dict[str, str]) -> list[Row]:
    bare = runs[base], runs[f"{base}, again"]
    wall_us = [statistics.mean(pair) for pair in zip(*(run.wall_us for run in bare), strict=True)]
    cpu_us = [statistics.mean(pair) for pair in zip(*(run.cpu_us for run in bare), strict=True)]
    return [
        {
            "part": part,
            "loop": name,
            "us a step": statistics.median(run.wall_us),
            "ratio": median_ratio(run.wall_us, wall_us),
            "CPU us a step": statistics.median(run.cpu_us),
            "CPU ratio": median_ratio(run.cpu_us, cpu_us),
            "a logged step": does[name],
        }
        for name, run in runs.items()
    ]


def device(rank: int = 0, ranks: int = 1) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")


def median_ratio(own: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def one_process(rounds: int) -> list[Row]:
    here = {name: loop for name, loop in LOOPS.items() if all(map(installed, loop[1]))}
    for name in LOOPS.keys() - here.keys():
        print(f"{name}: not measured, needs {' and '.join(LOOPS[name][1])} (extra [peers])\n")
    task = replace(MLP, device=device())
    runs = measure({name: train for name, (train, _, _) in here.items()}, task, rounds, warm=50)
    part = f"MLP 64-64-10, batch 32, SGD, one process, one thread, {task.device}; {rounds} rounds of 50 steps"
    return table(part, runs, "bare loop", {name: does for name, (_, _, does) in here.items()})


def two_ranks(rounds: int) -> list[Row]:
    """Rank 0's times."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, spawn) as pool:
        rank0, _ = pool.map(one_of_two, range(2), [folder] * 2, [rounds] * 2)
    return rank0


def one_of_two(rank: int, folder: str, rounds: int) -> list[Row]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = Place(rank, 2, rank, 2, f"{folder}/store", "benchmark")
    # Echelon first: it starts the process group that all use.
    trains = {
        "Echelon": partial(loops.echelon, place=place),
        "bare DDP, again": loops.bare_ddp,
        "bare DDP": loops.bare_ddp,
    }
    task = replace(TRANSFORMER, device=device(rank, 2))
    runs = measure(trains, task, rounds, warm=10)
    backend = "nccl" if task.device.type == "cuda" else "gloo"
    part = f"transformer, AdamW, two {backend} ranks of one thread; {rounds} rounds of 40 steps"
    does = dict.fromkeys(trains, "keeps the loss") | {"Echelon": "keeps loss and gradient norm"}
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

recipe, device = Toy(), "cuda" if torch.cuda.is_available() else "cpu"
model, data = recipe.model().to(device), recipe.data("train")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
batch = default_collate([data[i] for i in range(12)])
recipe.loss(model, {key: value.to(device) for key, value in batch.items()}).backward()
optimizer.step()
optimizer.zero_grad()
os.write(2, str(time.monotonic()).encode())
os._exit(0)
"""
ECHELON = ["-m", "trainer.main", "--config-dir", str(TOY / "conf"), "recipe=toy", "trainer.devices=1"]
ECHELON += [
    "trainer.precision=fp32",
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
    *_, two = ddp
    return [
        at_most("step without callbacks, times the bare loop", 1.10, ratio["Echelon"]),
        at_most("step with the default observers, times the bare loop", 1.15, ratio["Echelon, default observers"]),
        at_most("transformer step on two ranks, times bare DDP", 1.01, two["ratio"]),
        at_most("--help, seconds", 1.0, shown["seconds"]),
        at_most("first step, times import torch and a bare step", 1.5, first["ratio"]),
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, help="of each part, whatever --quick says")
    args = options.parse_args()
    about = machine(PACKAGES) | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ", end="\n\n")
    loop = one_process(args.rounds or (15 if args.quick else 100))
    ddp = two_ranks(args.rounds or (5 if args.quick else 50))
    start = start_up(args.rounds or 5)
    report([loop, ddp, start], goals(loop, ddp, start), about, args.json)


if __name__ == "__main__":
    main()
