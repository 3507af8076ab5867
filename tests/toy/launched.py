"""Functions for `launch`, and a command that launches one of them by its name."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from toy_recipe import Toy

from trainer import timeouts
from trainer.callback import Callback
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.errors import DataError
from trainer.launch.function import launch
from trainer.trainer import Trainer


class Waits(Callback):
    """Tells that a step was made, and then makes steps slowly."""

    def on_step_end(self, trainer) -> None:
        if trainer.rank == 0:
            Path("stepping").touch()
        time.sleep(0.05)


def make(max_steps: int, callbacks: Any = ()) -> Trainer:
    options = Options(max_steps=max_steps, run_dir="runs/r", checkpoint=CheckpointOptions(), timeout_s=60.0)
    return Trainer(Toy(), callbacks, batch=12, options=options, data=DataOptions(workers=0))


def trains(steps: int) -> dict[str, Any]:
    trainer = make(steps)
    summary = trainer.fit()
    again = trainer.fit(max_steps=steps + 2)
    print(f"caf\N{LATIN SMALL LETTER E WITH ACUTE} of rank {trainer.rank}")
    return {"ranks": again["ranks"], "steps": [summary["steps"], again["steps"]], "metrics": trainer.evaluate()}


def endless() -> dict[str, Any]:
    return make(100_000, [Waits()]).fit()


def refuses() -> None:
    if os.environ["RANK"] == "1":
        raise DataError("corpus.txt: is missing; restore it")


def fails() -> None:
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("trouble")
    time.sleep(600)


class FailsBeforeItsPass(Toy):
    """In the last validation; two batches are tried before the first step."""

    calls = 0

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls > 2 and os.environ["RANK"] == "1":
            raise OSError("no more memory on this GPU")
        return {"loss": (self.loss(model, batch), 1)}


def fails_in_lockstep() -> None:
    """The limit of a collective is that of `trainer.timeout_s`, ten minutes."""
    timeouts.PASS_S = 1.0
    options = Options(max_steps=2, run_dir="runs/r")
    Trainer(FailsBeforeItsPass(), [Shard(3)], batch=12, options=options, data=DataOptions(workers=0)).fit()


def dies() -> None:
    print("before", flush=True)
    if os.environ["RANK"] == "1":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def returns_a_lock() -> Any:
    return threading.Lock()


def returns_tensors() -> Any:
    return {"t": torch.arange(3.0), "argument": os.environ["WORLD_SIZE"]}


def pids() -> None:
    Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)


def main() -> None:
    name, devices, *args = sys.argv[1:]
    try:
        result = launch(globals()[name], *map(int, args), devices=int(devices))
    except KeyboardInterrupt:
        print("interrupted")
        return
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return
    print(json.dumps(result, default=str))
