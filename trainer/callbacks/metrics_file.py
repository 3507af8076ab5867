"""Writes `metrics.jsonl`: one JSON object a line, never lost or repeated across a resume."""

import json
import os
from typing import IO, Any

from trainer.callback import Callback
from trainer.run import finite, log


class MetricsFile(Callback):
    """The length of the file is part of the checkpoint: a resume cuts off what was written after it."""

    def __init__(self) -> None:
        self.file: IO[str] | None = None
        self.bytes = 0

    def on_fit_start(self, trainer) -> None:
        if trainer.rank:
            return
        path = trainer.run_dir / "metrics.jsonl"
        self.file = open(path, "a")  # noqa: SIM115 closed by on_fit_end
        if (found := os.path.getsize(path)) < self.bytes:
            log.warning("%s: lines are missing: %d bytes, and the checkpoint knows of %d", path, found, self.bytes)
        os.truncate(path, min(self.bytes, found))

    def on_step_end(self, trainer) -> None:
        if trainer.metrics:
            self._write(trainer, trainer.metrics)

    def on_validation_end(self, trainer, metrics: dict[str, float]) -> None:
        self._write(trainer, metrics)

    def _write(self, trainer, numbers: dict[str, float]) -> None:
        if self.file is None:
            return
        line = {"step": trainer.step, "samples": trainer.samples, "seconds": round(trainer.seconds, 3), **numbers}
        self.file.write(json.dumps(finite(line)) + "\n")
        self.file.flush()

    def on_fit_end(self, trainer) -> None:
        if self.file is not None:
            self.file.close()

    def state_dict(self) -> dict[str, Any]:
        if self.file is not None:
            os.fsync(self.file.fileno())  # the lines that a checkpoint counts must outlive what the checkpoint outlives
        return {"bytes": 0 if self.file is None else os.fstat(self.file.fileno()).st_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bytes = state["bytes"]
