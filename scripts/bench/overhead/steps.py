"""Times a training step of Echelon beside bare PyTorch: in one process, where other trainers join, and on two ranks."""

import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from scripts.bench.overhead import loops
from scripts.bench.overhead.loops import MLP, TRANSFORMER
from scripts.bench.overhead.turns import Train, Turns, measure
from scripts.bench.report import Row, installed, median_ratio
from trainer.process.environment import Place

# Name -> the loop, the packages that it needs, and its work in a logged step.
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


def table(part: str, runs: dict[str, Turns], base: str, logged: dict[str, str]) -> list[Row]:
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
            "a logged step": logged[name],
        }
        for name, run in runs.items()
    ]


def device(rank: int = 0, ranks: int = 1) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")


def one_process(rounds: int) -> list[Row]:
    """Time all loops whose packages are installed, and name the others."""
    here = {name: loop for name, loop in LOOPS.items() if all(map(installed, loop[1]))}
    for name in (name for name in LOOPS if name not in here):
        print(f"{name}: not measured, needs {' and '.join(LOOPS[name][1])} (extra [peers])\n")
    task = replace(MLP, device=device())
    runs = measure({name: train for name, (train, _, _) in here.items()}, task, rounds, warm=50)
    part = f"MLP 64-64-10, batch 32, SGD, one process, one thread, {task.device}; {rounds} rounds of 50 steps"
    return table(part, runs, "bare loop", {name: logged for name, (_, _, logged) in here.items()})


def step_timer(rounds: int) -> list[Row]:
    """Time Echelon with and without step_timer: the extra CPU time is what the callback takes of a step."""
    trains: dict[str, Train] = {
        "Echelon": loops.echelon,
        "Echelon, again": loops.echelon,
        "Echelon, step_timer": loops.echelon_timed,
    }
    task = replace(MLP, device=device())
    runs = measure(trains, task, rounds, warm=50)
    part = f"the clock of step_timer: MLP 64-64-10 as above; {rounds} rounds of 50 steps"
    logged = dict.fromkeys(trains, "keeps loss and gradient norm") | {"Echelon, step_timer": "step_times.jsonl, too"}
    bare = [statistics.mean(pair) for pair in zip(*(runs[name].cpu_us for name in list(trains)[:2]), strict=True)]
    rows = table(part, runs, "Echelon", logged)
    for row in rows:
        own = runs[row["loop"]].cpu_us
        row["extra CPU us a step"] = statistics.median(a - b for a, b in zip(own, bare, strict=True))
    return rows


def two_ranks(rounds: int) -> list[Row]:
    """Time Echelon beside bare DDP; the times are rank 0's."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, spawn) as pool:
        try:
            rank0, _ = pool.map(one_of_two, range(2), [folder] * 2, [rounds] * 2)
        except BaseException:  # also a signal; without its peer a rank would wait for a time-out
            for process in multiprocessing.active_children():
                process.kill()
            raise
    return rank0


def one_of_two(rank: int, folder: str, rounds: int) -> list[Row]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = Place(rank, 2, rank, 2, f"{folder}/store", "benchmark")
    # Echelon first: it starts the process group that all loops use.
    trains = {
        "Echelon": partial(loops.echelon, place=place),
        "bare DDP, again": loops.bare_ddp,
        "bare DDP": loops.bare_ddp,
    }
    task = replace(TRANSFORMER, device=device(rank, 2))
    runs = measure(trains, task, rounds, warm=10)
    backend = "nccl" if task.device.type == "cuda" else "gloo"
    part = f"transformer, AdamW, two {backend} ranks of one thread; {rounds} rounds of 40 steps"
    logged = dict.fromkeys(trains, "keeps the loss") | {"Echelon": "keeps loss and gradient norm"}
    return table(part, runs, "bare DDP", logged)[::-1]
