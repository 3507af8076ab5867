"""Times a training step of Echelon and of bare PyTorch: in one process, where other trainers join, and on two ranks."""

import statistics
from dataclasses import replace
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from scripts.bench import trainers
from scripts.bench.harness import Rounds, Row, median_ratio, missing, on_ranks
from scripts.bench.overhead.turns import MLP, TRANSFORMER, Train, measure
from scripts.bench.trainers import PACKAGES, Job
from trainer.loggers.tensorboard import TensorBoard
from trainer.monitors.advice.callback import Advice
from trainer.monitors.step_timer import StepTimer
from trainer.process.environment import Place

# Name -> the loop, and its work in a logged step.
LOOPS: dict[str, tuple[Train, str]] = {
    "bare loop": (trainers.bare, "keeps the loss"),
    "bare loop, again": (trainers.bare, "keeps the loss"),
    "bare loop, one parameter group": (trainers.bare_in_one_group, "keeps the loss"),
    "Echelon": (trainers.echelon, "keeps loss and gradient norm"),
    "Echelon, default observers": (
        lambda job: trainers.echelon(job, {
            **trainers.observers(), "tensorboard": TensorBoard(), "step_timer": StepTimer(), "advice": Advice()
        }), "terminal, log, metrics.jsonl, TensorBoard, speed",
    ),
    "Fabric": (trainers.fabric, "CSV file"),
    "ignite": (trainers.ignite, "keeps the loss"),
    "Accelerate": (trainers.accelerate, "keeps the loss"),
    "Hugging Face Trainer": (trainers.hugging_face, "terminal"),
    "Lightning": (trainers.lightning, "CSV file"),
}  # fmt: skip


def timed(job: Job) -> None:
    trainers.echelon(job, {"step_timer": StepTimer()})


def mean_of(found: Rounds, base: str, key: str) -> list[float]:
    """Return the mean of the two equal loops, by round."""
    pairs = zip(found.values(base, key), found.values(f"{base}, again", key), strict=True)
    return [statistics.mean(pair) for pair in pairs]


def table(part: str, found: Rounds, base: str, logged: dict[str, str]) -> list[Row]:
    def ratio(name: str, key: str) -> float:
        return median_ratio(found.values(name, key), mean_of(found, base, key))

    return found.table(part, "loop", {
        "us a step": lambda name: found.median(name, "us"), "ratio": lambda name: ratio(name, "us"),
        "CPU us a step": lambda name: found.median(name, "cpu"), "CPU ratio": lambda name: ratio(name, "cpu"),
        "a logged step": logged.__getitem__,
    })  # fmt: skip


def device(rank: int = 0, ranks: int = 1) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")


def one_process(rounds: int) -> list[Row]:
    """Time all loops whose packages are installed, and name the others."""
    lacks = {name: missing(PACKAGES.get(name, ())) for name in LOOPS}
    for name in filter(lacks.__getitem__, LOOPS):
        print(f"{name}: not measured, {lacks[name]}\n")
    task, here = replace(MLP, device=device()), {name: LOOPS[name] for name in LOOPS if not lacks[name]}
    found = measure({name: train for name, (train, _) in here.items()}, task, rounds, warm=50)
    part = f"MLP 64-64-10, batch 32, SGD, one process, one thread, {task.device}; {rounds} rounds of 50 steps"
    return table(part, found, "bare loop", {name: logged for name, (_, logged) in here.items()})


def step_timer(rounds: int) -> list[Row]:
    """Time Echelon with and without step_timer: the extra CPU time is what the callback takes of a step."""
    keeps = "keeps loss and gradient norm"
    logged = {"Echelon": keeps, "Echelon, again": keeps, "Echelon, step_timer": "step_times.jsonl, too"}
    trains: dict[str, Train] = {**dict.fromkeys(logged, trainers.echelon), "Echelon, step_timer": timed}
    found = measure(trains, replace(MLP, device=device()), rounds, warm=50)
    rows = table(
        f"the clock of step_timer: MLP 64-64-10 as above; {rounds} rounds of 50 steps", found, "Echelon", logged
    )
    bare = mean_of(found, "Echelon", "cpu")
    for row in rows:
        own = found.values(row["loop"], "cpu")
        row["extra CPU us a step"] = statistics.median(a - b for a, b in zip(own, bare, strict=True))
    return rows


def two_ranks(rounds: int) -> list[Row]:
    return on_ranks(2, one_of_two, rounds)[0]


def one_of_two(place: Place, rounds: int) -> list[Row]:
    # Echelon first: it starts the process group that all loops use.
    logged = {"Echelon": "keeps loss and gradient norm"} | dict.fromkeys(
        ("bare DDP, again", "bare DDP"), "keeps the loss"
    )
    trains: dict[str, Train] = dict.fromkeys(logged, partial(trainers.bare, wrap=DistributedDataParallel))
    trains["Echelon"] = partial(trainers.echelon, place=place)
    task = replace(TRANSFORMER, device=device(place.rank, 2))
    found = measure(trains, task, rounds, warm=10)
    backend = "nccl" if task.device.type == "cuda" else "gloo"
    part = f"transformer, AdamW, two {backend} ranks of one thread; {rounds} rounds of 40 steps"
    return table(part, found, "bare DDP", logged)[::-1]
