"""A real run on a real terminal: each state of the line is seen, and no line is wider than the terminal."""

import re
import sys

import pytest
from support.terminal import on_terminal

# Each state lasts until the terminal has shown it, which the test tells by a file.
RUN = """
import time
from pathlib import Path

from toy_recipe import Toy

from trainer.callback import Callback
from trainer.checkpoint import commit
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.log import Terminal
from trainer.loggers.progress import Progress
from trainer.monitors.throughput import Throughput
from trainer.process.environment import Place
from trainer.trainer import Trainer

def wait(name):
    end = time.monotonic() + 20
    while Terminal.console is not None and not Path(name).exists() and time.monotonic() < end:
        time.sleep(0.01)

class Slow(Toy):
    def metrics(self, model, batch):
        wait("first" if len(batch["x"]) > 1 else "validated")
        return {"loss": (self.loss(model, batch), 1)}

    def export(self, model, folder):
        wait("exported")

class Waits(Callback):
    def on_step_end(self, trainer):
        wait(f"step{trainer.step}")

real = commit.commit
def slow(*args):
    wait("written")
    return real(*args)
commit.commit = slow

Trainer(
    Slow(), {"progress": Progress(), "throughput": Throughput(), "waits": Waits()}, batch=12,
    options=Options(max_steps=16, run_dir="runs/r", checkpoint=CheckpointOptions(every_steps=None)),
    data=DataOptions(workers=0), place=Place(),
).fit()
"""


@pytest.mark.parametrize(
    ("columns", "first", "last"),
    [
        (80, r"step 1/16 \S+ +6%  epoch 1/2  loss [\d.]+", r"step 9/16 \S+ +56%  epoch 2/2  loss [\d.]+"),
        pytest.param(40, r"step 1/16 \S+ +6%  loss [\d.]+", r"step 9/16 \S+ +56%  loss [\d.]+", marks=pytest.mark.slow),
    ],
)
def test_what_a_run_does_is_seen(columns, first, last, tmp_path):
    """Numbers from step 1; the bar and its percentage; then validating, writing and exporting."""
    (tmp_path / "run.py").write_text(RUN)
    for step in range(1, 17):
        if step not in (1, 9):
            (tmp_path / f"step{step}").touch()
    states = [(first, "step1"), (last, "step9"), ("validating 1/2", "first"), ("validating 2/2", "validated")]
    states += [("writing", "written"), ("exporting", "exported")]
    reactions = [(pattern, (tmp_path / name).touch) for pattern, name in states]
    code, shown = on_terminal([sys.executable, "run.py"], tmp_path, columns, *reactions)
    assert code == 0, shown
    assert all(re.search(pattern, shown) for pattern, _ in states), shown
    drawn = [line for line in re.split(r"[\r\n]+", shown) if line.startswith("step ")]
    assert drawn and max(map(len, drawn)) <= columns, shown
    assert re.search(r"finished at step 16 after .* s\r?\n", shown)
