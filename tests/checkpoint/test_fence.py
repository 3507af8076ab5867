"""A writer that is stopped anywhere in a commit, and goes on when another has taken its place: it commits nothing, and
harms nothing of the other's. No lock is held here: the fence must do."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.checkpoints import NAMES, hidden, holds, steps

from trainer.checkpoint.commit import begin, commit
from trainer.checkpoint.fence import ATTEMPT, Superseded, refuse_superseded

REPO = str(Path(__file__).parents[2])
# Says what it goes on from, begins, and stops itself at the nth call of a function in its last commit.
WRITER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from trainer.checkpoint import commit, locate
from trainer.errors import ConfigError
run, names, fill, call, nth = Path(sys.argv[2]), sys.argv[3].split(), int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
found = locate.resolve("auto", run.parent, run)
print(found and found.name, flush=True)
attempt = commit.begin(run)
files = dict.fromkeys(names, memoryview(bytes([fill]) * 5000))
*before, last = map(int, sys.argv[7:])
for step in before:
    commit.publish(commit.commit(run, step, files, {}, attempt), attempt)
owner = os if call == "rename" else commit
real, calls = getattr(owner, call), []
def stopping(*args):
    calls.append(args)
    if len(calls) == nth:
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args)
setattr(owner, call, stopping)
try:
    commit.publish(commit.commit(run, last, files, {}, attempt), attempt)
except (ConfigError, OSError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
BEGINS, LOOKS, RENAMES, RENAMES_ANEW = ("sweep", 1), ("refuse_superseded", 1), ("rename", 1), ("rename", 2)
RENAMED = ("sync", 1)


@contextmanager
def stopped(run: Path, fill: int, call: str, nth: int, *steps: int) -> "Iterator[subprocess.Popen[str]]":
    command = [
        sys.executable,
        "-S",
        "-E",
        "-B",
        "-c",
        WRITER,
        REPO,
        str(run),
        " ".join(NAMES),
        str(fill),
        call,
        str(nth),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *map(str, steps)], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            assert state and state.si_code == os.CLD_STOPPED, process.communicate()
            yield process
        finally:
            process.kill()


def go_on(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    process.send_signal(signal.SIGCONT)
    said, told = process.communicate(timeout=20)
    return process.returncode, said, told


@pytest.mark.parametrize(
    ("zombie", "point", "step"),
    [(LOOKS, BEGINS, 8), (RENAMES, BEGINS, 8), (BEGINS, RENAMES, 8), (RENAMES, RENAMES, 8), (BEGINS, RENAMES_ANEW, 4)],
    ids=str,
)
def test_28_a_writer_that_was_taken_for_dead_goes_on(run: Path, zombie: tuple, point: tuple, step: int) -> None:
    """It was about to commit step 8. The second has resolved step 4, and is in its first commit: of 8, or of 4 anew."""
    with stopped(run, 1, *zombie, 4, 8) as first, stopped(run, 2, *point, step) as live:
        code, _, told = go_on(first)
        assert code == 1 and told.count("\n") == 1
        assert told.startswith(f"Superseded: trainer.checkpoint.dir={run.parent}: attempt 2, process {live.pid} on ")
        assert told.endswith("which was replaced and ends; nothing needs to be done\n")
        assert [holds(path) for path in run.glob("step-*")] == ([] if point == RENAMES_ANEW else [(4, 1)])
        assert go_on(live) == (0, "step-00000004\n", "")
    assert {holds(path) for path in run.glob("step-*")} == ({(4, 1), (8, 2)} if step == 8 else {(4, 2)})
    assert hidden(run) == []


def test_28_one_that_was_stopped_after_its_rename_leaves_the_link_where_it_is(run: Path) -> None:
    """The second has gone on from its checkpoint."""
    with stopped(run, 1, *RENAMED, 4, 8) as first, stopped(run, 2, *BEGINS, 12) as live:
        assert go_on(live) == (0, "step-00000008\n", "")
        code, _, told = go_on(first)
        assert code == 1 and told.startswith("Superseded: ")
    assert os.readlink(run.parent / "last.pt") == f"{run.name}/step-00000012"
    assert {holds(path) for path in run.glob("step-*")} == {(4, 1), (8, 1), (12, 2)} and hidden(run) == []


def test_attempts_are_counted_and_what_is_no_count_is_none(run: Path) -> None:
    files = {"state.json": memoryview(b"{}")}
    first = begin(run)
    assert [first.number, begin(run).number] == [1, 2]
    with pytest.raises(Superseded, match="attempt 2"):
        commit(run, 1, files, {}, first)
    assert steps(run) == [] and hidden(run) == []
    (run / ATTEMPT).write_bytes(b"\xff" * 9999)
    third = begin(run)  # it starts to count anew, and those before are refused all the same
    assert third.number == 1
    with pytest.raises(Superseded):
        refuse_superseded(run, first._replace(number=2))
    (run / ATTEMPT).unlink()  # as the whole folder may be by its user: nobody else writes it
    commit(run, 2, files, {}, third)
    assert steps(run) == [2]


def test_nothing_is_written_through_a_link(run: Path) -> None:
    precious = run.parents[1] / "precious"
    precious.write_text("precious")
    begin(run)
    (run / ATTEMPT).unlink()
    (run / ATTEMPT).symlink_to(precious)
    assert begin(run).number == 1 and precious.read_text() == "precious"
    (run / ATTEMPT).unlink()
    os.mkfifo(run / ATTEMPT)
    assert [begin(run).number, begin(run).number] == [1, 2]


def test_an_attempt_can_be_counted_after_any_that_the_file_says(run: Path) -> None:
    """A stranger's folder may say the greatest: the next one is read again, and fences."""
    run.mkdir(parents=True)
    (run / ATTEMPT).write_text("attempt 999999999, process 1 on host".ljust(256))
    first = begin(run)
    refuse_superseded(run, first)
    second = begin(run)
    assert (first.number, second.number) == (1, 2)
    with pytest.raises(Superseded):
        refuse_superseded(run, first)
