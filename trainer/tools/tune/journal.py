"""A search's journal: one line of JSON for each thing done, so that a killed search goes on where it was."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError


class Journal:
    """The lines of one search, keyed by everything that its results depend on.

    Args:
        path: The file; its folder is made.
        about: What the results depend on: the config, the machine, the settings of the search.

    Raises:
        ConfigError: The folder can't be written.
    """

    def __init__(self, path: Path, about: Any) -> None:
        self.path = path
        self.key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.lines: list[dict[str, Any]] = []
        self.why_anew = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._read(path.read_bytes())
            self.file = path.open("r+b" if self.lines else "wb")
        except OSError as error:
            raise ConfigError(
                f"{path}: can't be written: {error.strerror}; give a --config-dir that you may write to"
            ) from None
        if self.lines:
            self.file.truncate(self.whole)
            self.file.seek(self.whole)
        else:
            self.add("begin", key=self.key)

    def _read(self, content: bytes) -> None:
        """Take the whole lines of a search with this key that has not ended; a kill may have cut the last one."""
        self.whole = content.rfind(b"\n") + 1
        lines = []
        for text in content[: self.whole].splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                self.why_anew = "has a line that is not JSON"
                return
        if not lines or lines[0].get("key") != self.key:
            self.why_anew = "is of another config, machine, version or setting of the search"
        elif lines[-1]["event"] == "verdict":
            self.why_anew = "is of a search that has ended"
        else:
            self.lines = lines

    def add(self, event: str, **values: Any) -> dict[str, Any]:
        """Append a line; it is on the disk when this returns."""
        line = {"event": event, **values}
        self.file.write(f"{json.dumps(line)}\n".encode())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.lines.append(line)
        return line

    def all(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    def close(self) -> None:
        self.file.close()
