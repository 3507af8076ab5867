"""metrics.csv has the numbers of metrics.jsonl, also after a kill and a resume, and while the disk is full."""

import csv
import json
from pathlib import Path

import pytest
from support.messages import refuses
from support.runs import make

from trainer.callback import Callback
from trainer.errors import ConfigError
from trainer.loggers import csv as module
from trainer.loggers.csv import CSV
from trainer.loggers.metrics_file import MetricsFile

FILE = Path("runs/r/metrics.csv")


class Late(Callback):
    """A metric that comes late, and the end of the process at a step."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def on_step_end(self, trainer) -> None:
        if trainer.step >= 3:
            trainer.metrics['late/a, "b"'] = float("nan")

    def on_flush(self, trainer) -> None:
        if trainer.step == self.last:
            raise KeyboardInterrupt


def run(last: int = 0, **options) -> None:
    callbacks = {"a": Late(last), "csv": CSV(), "metrics_file": MetricsFile()}
    make(callbacks=callbacks, **{"max_steps": 6, "log_every_steps": 1, "validate_every": 3, **options}).fit()


def rows() -> list[dict[str, str]]:
    with FILE.open(newline="") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def same_as_metrics_file() -> None:
    lines = [json.loads(line) for line in Path("runs/r/metrics.jsonl").read_text().splitlines()]
    assert [{k: "nan" if v is None else str(v) for k, v in line.items()} for line in lines] == rows()


def test_the_numbers_of_a_run(tmp_path):
    run()
    same_as_metrics_file()
    assert FILE.read_text().startswith(
        'step,samples,seconds,train/loss,train/lr,train/grad_norm,"late/a, ""b""",val/loss\n'
    )
    assert [row["step"] for row in rows()] == ["1", "2", "3", "3", "4", "5", "6", "6"]


def test_a_resume_repeats_no_row(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(5, validate_every=5)  # after step 5 is written; the checkpoint is of step 4
    with FILE.open("a") as file:
        file.write("5,60,0.")  # as a kill leaves it
    run(resume="auto", validate_every=5)
    assert [row["step"] for row in rows()] == ["1", "2", "3", "4", "5", "5", "6", "6"]
    same_as_metrics_file()


def test_a_resume_that_is_refused_leaves_the_file(tmp_path):
    class Refuses(Callback):
        def on_fit_start(self, trainer) -> None:
            raise ConfigError("callbacks.refuses: refuses; leave it out")

    make(callbacks={"csv": CSV()}, max_steps=4, log_every_steps=1).fit()
    before = FILE.read_bytes()
    with refuses("callbacks.refuses", "refuses"):
        make(callbacks={"csv": CSV(), "refuses": Refuses()}, resume="ckpt/r/step-00000002").fit()
    assert FILE.read_bytes() == before


def test_a_full_disk_delays_a_new_column(tmp_path, monkeypatch, messages):
    """Numbers of old columns are written as ever; the new column comes when there is room."""
    written, full = module.write_whole, [False]

    def write_whole(path: Path, content: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        written(path, content)

    class Fills(Callback):
        def on_step_end(self, trainer) -> None:
            full[0] = trainer.step in (3, 4)

    monkeypatch.setattr(module, "write_whole", write_whole)
    make(callbacks={"a": Late(), "b": Fills(), "csv": CSV()}, max_steps=6, log_every_steps=1).fit()
    assert [(row["step"], 'late/a, "b"' in row) for row in rows()] == [
        ("1", False), ("2", False), ("3", False), ("4", False), ("5", True), ("6", True), ("6", False)
    ]  # fmt: skip
    assert [text for text in messages if "csv" in text and "wait" in text] == [
        "runs/r/metrics.csv: can't be rewritten: No space left on device; new columns wait"
    ]


def test_a_line_that_a_kill_cut_is_dropped_by_the_resume(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(last=4)
    with FILE.open("a") as file:
        file.write("4,4")
    run(resume="auto")
    assert [row["step"] for row in rows()] == ["1", "2", "3", "3", "4", "5", "6", "6"]
