"""Files of a run: those that grow, even while the disk is full, and those that appear whole or not at all."""

import json
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.log import log

if TYPE_CHECKING:
    pass


MOST = 1 << 20  # bytes kept of a file


class Appended:
    """What can't be written is kept, and written with what comes when there is room again; of more than `MOST` bytes
    the newest is lost. The log tells of both, once. Nothing is opened before the first write."""

    def __init__(self, path: Path) -> None:
        self.path, self.kept = path, b""
        self.file: int | None = None
        self.trouble = 0  # told of: 1, it can't be written; 2, something was lost

    def write(self, content: bytes) -> int:
        if self.kept:
            self.flush()  # there may be room again
        lost = bool(self.kept) and len(self.kept) + len(content) > MOST
        self.kept += b"" if lost else content
        self.flush()
        if lost:
            self._tell(2, f"more than {MOST >> 10} KiB could not be written: what comes now is lost")
        return len(content)

    def flush(self, durably: bool = False) -> None:
        try:
            if self.file is None:
                self.path.parent.mkdir(exist_ok=True)
                self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            while self.kept:
                self.kept = self.kept[os.write(self.file, self.kept) :]
            if durably:
                os.fsync(self.file)
        except OSError as error:
            self._tell(1, f"{error.strerror}; training goes on, and what should be there is kept until there is room")
            return
        if self.trouble:
            self.trouble = 0
            log.info("%s: written again", self.path)

    def close(self) -> None:
        if self.kept:
            self.flush()
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def state_dict(self) -> dict[str, Any]:
        """What the file has, on the disk, and what else it should have."""
        if self.file is not None:
            self.flush(durably=True)
        return {"bytes": self.path.stat().st_size if self.path.exists() else 0, "kept": self.kept.decode()}

    def go_on(self, state: dict[str, Any]) -> None:
        """Cuts off what was written after `state` was taken."""
        found = self.path.stat().st_size if self.path.exists() else 0
        if found < state["bytes"]:
            text = "%s: lines are missing: %d bytes, and the checkpoint knows of %d"
            log.warning(text, self.path, found, state["bytes"])
        if found:
            os.truncate(self.path, min(state["bytes"], found))
        if state["kept"]:
            self.write(state["kept"].encode())

    def _tell(self, trouble: int, text: str) -> None:
        if trouble > self.trouble:
            self.trouble = trouble  # first: the log may be such a file, too
            log.warning("%s: %s", self.path, text)


def write_whole(path: Path, content: bytes) -> None:
    """Its bytes are on the disk when this returns; of two writers at once, either. An error leaves what was there."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all; a number that JSON has no form for becomes null."""
    write_whole(path, f"{json.dumps(finite(value), indent=1, allow_nan=False)}\n".encode())


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
