"""Keeps a search's journal, a line of JSON for each thing done, so that a killed search can resume."""

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import ConfigError, printable
from trainer.log import log

BEGIN = b'{"event": "begin"'  # each journal starts with it


class Journal:
    """The lines of one search, keyed by everything its results depend on. One process at a time writes them.

    Args:
        path: The file; its folder is created.
        about: What the results depend on: the config, the machine, the settings of the search.
    """

    def __init__(self, path: Path, about: Any) -> None:
        self.path = path
        self.key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.lines: list[dict[str, Any]] = []
        self.discarded = ""  # why an existing journal was not resumed
        by = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a+b")
            lock(self.file, path)
            self.file.seek(0)
            if content := self.file.read():
                if content[: len(BEGIN)] != BEGIN[: len(content)]:
                    self.file.close()
                    raise ConfigError(f"{path}: is a file that Echelon did not write; give another tune.name")
                self._read(content)
            self.file.truncate(self.whole if self.lines else 0)
        except OSError as error:
            fix = "give a --config-dir that you may write to"
            raise ConfigError(f"{path}: can't be written: {error.strerror}; {fix}") from None
        known = {} if self.lines else {"key": self.key}
        self.add("again" if self.lines else "begin", **known, by=by)

    def _read(self, content: bytes) -> None:
        """Take the complete lines of a search with this key that has not ended; a kill may have cut the last one."""
        self.whole = content.rfind(b"\n") + 1
        lines = []
        for text in content[: self.whole].splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                self.discarded = "has a line that is not JSON"
                return
        if not lines or lines[0].get("key") != self.key:
            self.discarded = "is of another config, machine, version or setting of the search"
        elif lines[-1]["event"] == "verdict":
            self.discarded = "is of a search that has ended"
        else:
            self.lines = lines

    def add(self, event: str, **values: Any) -> dict[str, Any]:
        """Append a line, and sync it to the disk."""
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


def lock(file: BinaryIO, path: Path) -> None:
    """Lock the journal until it is closed or the process ends.

    If the file system has no locks, a warning is logged instead.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            log.warning("%s: can't be locked (%s); make sure that no other search writes it", path, error.strerror)
            return
        file.seek(0)
        by = re.findall(rb'"by": "([^"]*)"', file.read()) or [b"another process"]
        file.close()
        raise ConfigError(
            f"{path}: {printable(by[-1].decode(errors='replace'))} searches under this name; wait for it to end, or "
            "give another tune.name"
        ) from None
