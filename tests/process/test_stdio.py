"""Standard descriptors that a daemon has closed, and that ranks share."""

import os
import socket
import subprocess
import sys

from support.cli import environment

OPENS = """
import os
from trainer import main

def command(words):
    with open(*words, "w") as file:
        file.write(" ".join([str(file.fileno()), *(os.readlink(f"/proc/self/fd/{n}") for n in range(3))]))
    return 0

main.command = command
main.main()
"""


def test_no_file_takes_the_number_of_a_closed_one(tmp_path):
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", OPENS, str(tmp_path / "found")]
    assert subprocess.run(words, env=environment(), timeout=60).returncode == 0
    number, *opened = (tmp_path / "found").read_text().split()
    assert int(number) > 2 and opened == [os.devnull] * 3


def test_a_second_call_keeps_the_output(tmp_path):
    """As by `echelon compare`: the command calls it, and the tool."""
    code = "from trainer.process.stdio import tolerate_closed_pipes as call; call(); call(); print(1)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_line_of_standard_error_is_one_write():
    """Else srun mixes the lines of ranks that fail together. Each packet is a write."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = """
import sys
from trainer import main
main.command = lambda words: print("echelon:", *words, file=sys.stderr) or 0
main.main()
"""
    command, env = [sys.executable, "-c", code, "a line"], environment(PYTHONUNBUFFERED="1")
    with ours, theirs:
        assert subprocess.run(command, env=env, stderr=theirs, timeout=60).returncode == 0
        assert ours.recv(1 << 16) == b"echelon: a line\n"
