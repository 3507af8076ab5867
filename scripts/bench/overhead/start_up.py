"""Times fresh processes: `--help`, a bare step, and Echelon's first step."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench.harness import Rounds, Row, Turn

ROOT = Path(__file__).parents[3]
TOY = ROOT / "tests" / "toy"
# After the first step, either process writes the time and exits.
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
IMPORT = re.compile(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", re.MULTILINE)
LISTED = 6  # packages
PROCESSES = {
    "--help": ["-m", "trainer.main", "--help"],
    "import torch, a bare step": ["-c", BARE],
    "Echelon, the toy's first step": ECHELON,
}


@contextmanager
def place() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a folder and an environment for the processes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "clock.py").write_text(CLOCK)
        yield (
            folder,
            os.environ
            | {
                "PYTHONPATH": os.pathsep.join([folder, str(ROOT), str(TOY)]),
                "OMP_NUM_THREADS": "1",
            },
        )


def imports() -> list[Row]:
    """List the packages whose modules take longest to import until Echelon's first step, by `-X importtime`."""
    with place() as (folder, env):
        command = [sys.executable, "-X", "importtime", *ECHELON]
        said = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stderr
    found = IMPORT.findall(said)
    times, counts = Counter[str](), Counter(name.partition(".")[0] for _, name in found)
    for microseconds, name in found:
        times[name.partition(".")[0]] += int(microseconds)
    listed = [(name, counts[name], spent) for name, spent in times.most_common(LISTED)]
    listed.append(("all", len(found), times.total()))
    part = "imports until Echelon's first step, by -X importtime"
    return [{"part": part, "package": name, "modules": count, "seconds": spent / 1e6} for name, count, spent in listed]


def start_up(rounds: int) -> list[Row]:
    """Start each process once in every round; a time ends with the process or with its first step."""
    with place() as (folder, env):

        def start(name: str) -> Turn:
            began = time.monotonic()
            command = [sys.executable, *PROCESSES[name]]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name}: ended with code {done.returncode}\n{done.stderr}")
            return {"seconds": float(done.stderr or time.monotonic()) - began}

        found = Rounds.of(PROCESSES).run(rounds, start)
    return found.table(f"a fresh process; {rounds} rounds", "process", {
        "seconds": found.median, "ratio": lambda name: found.ratio(name, "import torch, a bare step"),
    })  # fmt: skip
