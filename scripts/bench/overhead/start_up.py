"""Times fresh processes: `--help`, a bare step, and Echelon's first step."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.report import Row, median_ratio

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
PROCESSES = {
    "--help": ["-m", "trainer.main", "--help"],
    "import torch, a bare step": ["-c", BARE],
    "Echelon, the toy's first step": ECHELON,
}


def start_up(rounds: int) -> list[Row]:
    """Start each process once in every round; a time ends with the process or with its first step."""
    seconds: dict[str, list[float]] = {name: [] for name in PROCESSES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "clock.py").write_text(CLOCK)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(ROOT), str(TOY)]), "OMP_NUM_THREADS": "1"}
        for _ in range(rounds):
            for name, command in PROCESSES.items():
                began = time.monotonic()
                done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{name}: ended with code {done.returncode}\n{done.stderr}")
                seconds[name].append(float(done.stderr or time.monotonic()) - began)
    part, base = f"a fresh process; {rounds} rounds", seconds["import torch, a bare step"]
    return [
        {"part": part, "process": name, "seconds": statistics.median(own), "ratio": median_ratio(own, base)}
        for name, own in seconds.items()
    ]
