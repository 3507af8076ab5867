"""S6: strangers talk to every port that a run on one node listens on, from its start: it goes on."""

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest
from support.cli import QUICK, TOY, lines, popen, run

WORDS = [*TOY, *QUICK, "trainer.devices=2", "trainer.max_steps=12", "trainer.run_dir=runs/r"]
# Not eight zero bytes: to gloo that is another rank, in whose place the stranger then is (see docs/security.md).
GREETINGS = (b"", b"GET / HTTP/1.0\r\n\r\n", b"\0", b"\xff" * 4096, b"\x80\x04cposix\nsystem\n")


def descendants(pid: int) -> set[int]:
    found = {pid}
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found |= {each for child in file.read_text().split() for each in descendants(int(child))}
    return found


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """Addresses, as /proc has them, and ports."""
    own: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(os.readlink(link))
    tables = [Path(f"/proc/net/{kind}") for kind in ("tcp", "tcp6", "udp", "udp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    open_rows = [row for row in rows if row[3] in ("0A", "07") and f"socket:[{row[9]}]" in own]
    return {(address, int(port, 16)) for address, port in (row[1].split(":") for row in open_rows)}


@pytest.mark.timeout(300)
def test_strangers_at_the_ports_of_a_run(tmp_path: Path) -> None:
    assert run(WORDS, tmp_path, timeout_s=120).code == 0
    expected = lines(tmp_path / "runs" / "r")
    (tmp_path / "again").mkdir()
    met: set[tuple[str, int]] = set()
    with contextlib.ExitStack() as kept, popen(WORDS, tmp_path / "again", TMPDIR=str(tmp_path)) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None:
            assert time.monotonic() < deadline or process.kill()
            for address, port in listening(descendants(process.pid)) - met:
                met.add((address, port))
                for greeting in GREETINGS:
                    with contextlib.suppress(OSError):
                        stranger = kept.enter_context(socket.create_connection(("127.0.0.1", port), 1))
                        stranger.sendall(greeting)
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
            time.sleep(0.02)
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert len(met) >= 2 and {address for address, _ in met} <= {"0100007F", "00000000000000000000000001000000"}
    assert lines(tmp_path / "again" / "runs" / "r") == expected, out
