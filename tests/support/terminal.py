"""Runs a command on a terminal of a given size, and reads what it shows."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

from support.cli import environment

LIMIT_S = 60
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

Reaction = tuple[str, Callable[[], object]]  # called once the screen has shown text that the pattern finds


def on_terminal(command: list[str], cwd: Path, columns: int, *reactions: Reaction, **env: str) -> tuple[int, str]:
    """Return the exit code, and all that was shown, without colours and movements of the cursor."""
    ours, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = environment(TERM="xterm", **env)
    for name in ("COLUMNS", "LINES"):  # else the size is theirs
        clean.pop(name, None)
    process = subprocess.Popen(
        command, cwd=cwd, env=clean, stdin=inside, stdout=inside, stderr=inside, start_new_session=True
    )
    os.close(inside)
    shown, waiting = b"", list(reactions)
    try:
        with contextlib.suppress(OSError):  # the other side is closed
            while text := os.read(ours, 4096):
                shown += text
                if waiting and re.search(waiting[0][0], plain(shown)):
                    waiting.pop(0)[1]()
        return process.wait(LIMIT_S), plain(shown)
    finally:
        os.close(ours)
        process.kill()
        process.wait()


def plain(shown: bytes) -> str:
    return ESCAPES.sub("", shown.decode(errors="replace"))
