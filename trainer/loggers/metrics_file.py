"""Writes `metrics.jsonl`: one JSON object per line. A resume neither loses nor repeats a line."""

import json
from typing import Any

from trainer.context import Context
from trainer.files import Appended, finite
from trainer.loggers.logger import Logger


class MetricsFile(Logger):
    """Writes metrics.jsonl. A checkpoint stores the file's length, so that a resume can cut off later lines."""

    def __init__(self) -> None:
        self.file: Appended | None = None
        self.saved = {"bytes": 0, "kept": ""}

    def on_fit_start(self, trainer) -> None:
        if trainer.rank:
            return
        self.file = Appended(trainer.run_dir / "metrics.jsonl")
        self.file.go_on(self.saved)
        if not self.file.path.exists():
            self.file.flush()  # the file exists from the beginning

    def write(self, trainer: Context, numbers: dict[str, float]) -> None:
        assert self.file
        self.file.write(f"{json.dumps(finite(self.row(trainer, numbers)))}\n".encode())

    def on_fit_end(self, trainer) -> None:
        if self.file is not None:
            self.file.close()

    def state_dict(self) -> dict[str, Any]:
        return self.saved if self.file is None else self.file.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state
