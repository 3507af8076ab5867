"""The folder of a run, its log, and its summary."""

import json
import logging
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

log = logging.getLogger("echelon")


def make_run_dir(run_dir: str | None, name: str, resumed: bool) -> Path:
    """The folder `run_dir`, or a new one `runs/<name>-<time>`.

    Raises:
        ConfigError: where the folder holds another run.
    """
    if run_dir is None:
        stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = stem
        for n in range(2, 1000):
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                folder = stem.with_name(f"{stem.name}-{n}")
            except OSError as error:
                raise ConfigError(
                    f"trainer.run_dir=null: can't make {folder}: {error.strerror}; give trainer.run_dir"
                ) from None
    folder = Path(run_dir or "")
    if (folder / "metrics.jsonl").exists() and not resumed:
        raise ConfigError(
            f"trainer.run_dir={run_dir}: holds a run already; go on by trainer.resume=auto, or give another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trainer.run_dir={run_dir}: can't make it: {error.strerror}; give another folder") from None
    return folder


def show_log(rank: int) -> None:
    """Rank 0's events to the terminal, until `start_log` knows of a folder for them too."""
    stop_log()
    log.handlers = [logging.NullHandler() if rank else Terminal()]
    log.setLevel(logging.INFO)
    log.propagate = False


def start_log(run_dir: Path, rank: int) -> None:
    """Events go to logs/rank<rank>.log; rank 0's also to the terminal. Of other ranks all output goes to their file."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    path = run_dir / "logs" / f"rank{rank}.log"
    if rank:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        handlers: list[logging.Handler] = [logging.StreamHandler()]
    else:
        handlers = [logging.FileHandler(path), Terminal()]
    for handler in handlers:
        if not isinstance(handler, Terminal):
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    stop_log()
    log.handlers = handlers
    log.setLevel(logging.INFO)
    log.propagate = False


def stop_log() -> None:
    for handler in log.handlers:
        handler.close()
    log.handlers = []


class Terminal(logging.Handler):
    """Standard output; while a progress bar is shown, `console` prints above it."""

    console: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        message = (
            record.getMessage()
            if record.levelno < logging.WARNING
            else f"{record.levelname.lower()}: {record.getMessage()}"
        )
        if Terminal.console is not None:
            Terminal.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, flush=True)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all; a number that JSON has no form for becomes null."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")
    temporary.rename(path)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    import numpy
    import torch

    from trainer import __version__

    return {
        "echelon": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
