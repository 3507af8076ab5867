"""Folders that are slow, full, read-only or dead: each is one finding, in bounded time."""

import os
import shutil
import threading
from types import SimpleNamespace

import pytest

from trainer import timeouts
from trainer.tools.doctor import disk
from trainer.tools.doctor.finding import ERROR, OK, WARNING

MIB, GIB = 1 << 20, 1 << 30


def test_a_disk_of_this_machine(tmp_path):
    found, temporary = disk.examine(tmp_path)
    assert found.subject == f"disk of {tmp_path}" and found.data["write"] > 0 and found.data["read"] > 0
    assert temporary.subject.startswith("TMPDIR ") and temporary.data.keys() == {"free"}
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    written = list[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: written.append(os.fstat(descriptor).st_size))
    disk.speed(tmp_path, 3 * MIB)
    assert written == [3 * MIB]


@pytest.mark.parametrize(
    ("free", "write_s", "level", "words"),
    [
        (10 * GIB, 32 / 10, WARNING, "a checkpoint of 1 GiB takes 102 s"),
        (GIB // 2, 0.01, WARNING, "checkpoints may not fit"),
        (10 * GIB, 0.01, OK, ""),
    ],
)
def test_slow_and_nearly_full(tmp_path, monkeypatch, free, write_s, level, words):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(disk, "speed", lambda folder, count: (write_s, 0.02))
    (found,) = disk.tried("disk", tmp_path, 32 * MIB)
    assert (found.level, found.consequence) == (level, words)
    assert found.data["write"] == pytest.approx(32 * MIB / write_s)


def test_a_folder_that_is_missing_or_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in (("none", "No such file or directory"), ("file", "Not a directory")):
        (found,) = disk.tried("disk", tmp_path / folder, 1)
        assert (found.level, found.value) == (ERROR, reason) and "--folder" in found.way_out


def test_a_dead_file_system_takes_no_longer_than_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(timeouts, "DISK_S", 0.05)
    answer, ended = threading.Event(), threading.Event()

    def hang(folder):
        answer.wait()
        ended.set()
        raise OSError("late")

    monkeypatch.setattr(shutil, "disk_usage", hang)
    for found in disk.examine(tmp_path):
        assert (found.level, found.value) == (ERROR, "no answer within 0.05 s")
    answer.set()
    assert ended.wait(20)
