"""The journal: what a killed search leaves, and what another one may not take."""

import errno
import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from trainer.errors import ConfigError
from trainer.tools.tune.journal import Journal


def test_a_killed_search_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "x.jsonl"
    first = Journal(path, {"a": 1})
    first.add("trial", n=1)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"event": "tri')  # cut off by the kill
    second = Journal(path, {"a": 1})
    assert [line["n"] for line in second.all("trial")] == [1] and not second.discarded
    second.add("trial", n=2)
    second.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["begin", "trial", "again", "trial"]


@pytest.mark.parametrize("how", ["other", "ended", "damaged"])
def test_another_search_begins_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x.jsonl"
    first = Journal(path, {"a": 1})
    first.add("verdict" if how == "ended" else "trial")
    first.close()
    if how == "damaged":
        path.write_bytes(path.read_bytes() + b"odd\n")
    second = Journal(path, {"a": 2 if how == "other" else 1})
    second.close()
    assert second.discarded and len(path.read_text().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"x.jsonl: can't be written: Permission denied"):
        Journal(tmp_path / "x.jsonl", {})


def test_a_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("")
    with pytest.raises(ConfigError, match=r"x.jsonl: can't be written: .*; give a --config-dir"):
        Journal(tmp_path / "tuned" / "x.jsonl", {})


HOLD = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, 2); print(flush=True); sys.stdin.read()"


def test_two_searches_of_one_name_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Journal(path, {"a": 1}).close()
    before = path.read_bytes()
    with Popen([sys.executable, "-S", "-c", HOLD, str(path)], stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        told = (
            rf"x\.jsonl: process {os.getpid()} on .* searches under this name; wait for it to end, or give another tune"
        )
        for about in ({"a": 1}, {"a": 2}):
            with pytest.raises(ConfigError, match=told):
                Journal(path, about)
        other.communicate(timeout=20)
    assert path.read_bytes() == before
    Journal(path, {"a": 1}).close()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    Journal(tmp_path / "x.jsonl", {}).close()
    assert "x.jsonl: can't be locked (No locks available); make sure that no other search writes it" in caplog.text
