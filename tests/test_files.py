"""Files that are there whole or not at all; files that are appended to, on a full disk. On a real one: tests/faults."""

import contextlib
import errno
import io
import logging
import os
import resource
import shutil
from pathlib import Path

import pytest
from support.messages import refuses

from trainer import files
from trainer.files import Appended, refuse_folder, sha256_of, sync, write_whole
from trainer.log import log
from trainer.process.stdio import Output
from trainer.run_dir import LogFile


class Disk:
    """Takes so many more bytes, as a real one does: part of a write, and then none."""

    def __init__(self, monkeypatch, room: int) -> None:
        self.room, self.write = room, os.write
        monkeypatch.setattr(files.os, "write", self)

    def __call__(self, file: int, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.write(file, content[: self.room])
        self.room -= written
        return written


@pytest.fixture
def said(monkeypatch):
    """What the log tells."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(log, "handlers", [handler])
    log.setLevel(logging.INFO)
    return lines


def test_a_file_that_is_removed_begins_anew(tmp_path, said):
    """With its folder, too."""
    file = Appended(tmp_path / "folder" / "file")
    file.write(b"one\n")
    shutil.rmtree(tmp_path / "folder")
    file.write(b"two\n")
    file.write(b"three\n")
    assert file.path.read_bytes() == b"two\nthree\n" and len(said) == 1
    assert said[0] == f"{file.path}: was removed during the run; its earlier lines are lost"
    assert file.state_dict() == {"bytes": 10, "kept": ""}
    file.close()


def test_a_log_that_is_removed_tells_of_it_in_the_new_one(tmp_path, monkeypatch):
    handler = LogFile(tmp_path / "rank0.log")
    monkeypatch.setattr(log, "handlers", [handler])
    log.warning("one")
    handler.file.path.unlink()
    log.warning("two")
    handler.close()
    two, removed = handler.file.path.read_text().splitlines()
    assert two == "two" and removed.startswith(f"{handler.file.path}: was removed during")


def test_a_file_is_replaced_in_a_folder_that_is_gone(tmp_path):
    write_whole(tmp_path / "folder" / "file", b"1")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(tmp_path, monkeypatch, said):
    path = tmp_path / "new" / "file"
    file, disk = Appended(path), Disk(monkeypatch, room=7)
    for line in (b"one\n", b"two\n", b"three\n"):
        assert file.write(line) == len(line)
    assert path.read_bytes() == b"one\ntwo" and len(said) == 1
    assert said[0].startswith(f"{path}: No space left on device; training continues")
    disk.room = 100
    file.write(b"four\n")
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\n" and said[1:] == [f"{path}: can be written again"]
    disk.room = 0
    file.write(b"five\n")
    disk.room = 100
    file.close()
    assert path.read_bytes().endswith(b"four\nfive\n") and len(said) == 4


def test_what_is_kept_is_bounded_and_the_loss_is_told(tmp_path, monkeypatch, said):
    monkeypatch.setattr(files, "MOST", 2048)
    file, disk = Appended(tmp_path / "file"), Disk(monkeypatch, room=0)
    lines = [b"%3d %s\n" % (n, b"x" * 95) for n in range(40)]
    for line in lines:
        file.write(line)
    assert len(said) == 2 and said[1].endswith("more than 2 KiB could not be written; new lines are lost")
    disk.room = 10**6
    file.write(b"end\n")
    assert (tmp_path / "file").read_bytes() == b"".join(lines[:20]) + b"end\n"
    file.close()


def test_a_checkpoint_has_what_the_file_has_not(tmp_path, monkeypatch, said):
    file, disk = Appended(tmp_path / "file"), Disk(monkeypatch, room=6)
    for line in (b"one\n", b"two\n"):
        file.write(line)
    state = file.state_dict()
    assert state == {"bytes": 6, "kept": "o\n"}
    disk.room = 100
    file.write(b"lost, as what comes after a checkpoint\n")
    file.close()
    again = Appended(tmp_path / "file")
    again.go_on(state)
    again.write(b"three\n")
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\nthree\n"
    assert again.state_dict() == {"bytes": 14, "kept": ""}
    again.close()
    (tmp_path / "file").write_bytes(b"one\n")
    again = Appended(tmp_path / "file")
    again.go_on({"bytes": 14, "kept": ""})
    again.write(b"")
    assert said[-1].endswith("lines are missing: the file has 4 bytes, and the checkpoint counted 14")
    (tmp_path / "file").write_bytes(bytes(14))
    again = Appended(tmp_path / "file")
    again.go_on({"bytes": 14, "kept": ""})
    again.write(b"three\n")
    again.close()
    assert said[-1].endswith("lines are missing: it ends in zero bytes, as after a power loss")
    assert (tmp_path / "file").read_bytes() == bytes(14) + b"\nthree\n"


def refuse(*args: object) -> None:
    raise OSError(errno.EACCES, "Permission denied")


def test_a_file_that_can_not_be_cut_gets_its_lines_later(tmp_path, monkeypatch, said):
    file = Appended(tmp_path / "file")
    file.path.write_bytes(b"one\nlost\n")
    file.go_on({"bytes": 4, "kept": "two\n"})
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "truncate", refuse)
        file.write(b"three\n")
        file.write(b"four\n")
        assert file.state_dict() == {"bytes": 4, "kept": "two\nthree\nfour\n"}
    assert said == [f"{file.path}: Permission denied; training continues, and new lines are kept until there is room"]
    file.write(b"five\n")
    assert file.path.read_bytes() == b"one\ntwo\nthree\nfour\nfive\n" and said[1:] == [
        f"{file.path}: can be written again"
    ]
    file.close()


def test_a_file_that_a_server_has_lost_is_a_warning(tmp_path, monkeypatch, said):
    file = Appended(tmp_path / "file")
    file.write(b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fstat", refuse)
        file.write(b"two\n")
    assert len(said) == 1 and "training continues" in said[0]
    file.close()
    assert file.path.read_bytes() == b"one\ntwo\n"


def test_the_log_itself_may_be_on_that_disk(tmp_path, monkeypatch, said):
    """What it tells of itself goes through itself."""
    monkeypatch.setattr(files, "MOST", 1024)
    log.addHandler(LogFile(tmp_path / "log"))
    disk = Disk(monkeypatch, room=0)
    for n in range(100):
        log.info("line %d of a log", n)
    assert len(said) == 102
    disk.room = 10**6
    log.info("end")
    written = (tmp_path / "log").read_text().splitlines()
    assert written[:2] == ["line 0 of a log", f"{tmp_path}/log: {said[1].split(': ', 1)[1]}"]
    assert written[-2:] == [f"{tmp_path}/log: can be written again", "end"]
    log.handlers[-1].close()


class Full(io.RawIOBase):
    """What standard output is when it goes into a file on a full disk."""

    def __init__(self) -> None:
        self.full, self.got = True, b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise AssertionError("it is not given up")

    def write(self, content) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.got += bytes(content)
        return len(content)


def test_standard_output_comes_back_with_the_room(said):
    output = Output(io.BufferedWriter(disk := Full()), "utf-8", None, None, True)
    print("lost", "x" * 10_000, file=output)
    disk.full = False
    print("here again", file=output)
    output.flush()
    assert disk.got.endswith(b"here again\n") and not said


def test_one_large_write_is_no_loss_on_a_disk_with_room(tmp_path, said):
    file = Appended(tmp_path / "file")
    file.write(large := b"x" * (2 * files.MOST))
    file.write(b"end")
    file.close()
    assert (tmp_path / "file").read_bytes() == large + b"end" and not said


def test_what_can_not_be_written_leaves_what_was_there(tmp_path):
    file = tmp_path / "a.json"
    write_whole(file, b"1" * 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_whole(file, b"2" * 5000)  # part of it fits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == b"1" * 100 and os.listdir(tmp_path) == ["a.json"]
    write_whole(file, b"2" * 5000)
    assert file.read_bytes() == b"2" * 5000


def test_an_exported_file_gets_the_permissions_of_a_new_one(tmp_path):
    """Libraries that write to a temporary file first leave it to its owner alone."""
    (tmp_path / "folder").mkdir()
    (mine := tmp_path / "mine").touch(0o600)
    before = os.umask(0o027)
    try:
        with files.usual_permissions(tmp_path):
            (file := tmp_path / "folder" / "model.safetensors").touch(0o600)
    finally:
        os.umask(before)
    assert (file.stat().st_mode & 0o777, mine.stat().st_mode & 0o777) == (0o640, 0o600)


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EINVAL, False), (errno.ENOSPC, True), (errno.EIO, True)])
def test_a_folder_that_its_file_system_can_not_sync_is_let_be(number, is_refused, tmp_path, monkeypatch):
    """As on FUSE. A file has to be on the disk."""
    (tmp_path / "file").touch()
    sync(tmp_path / "file")
    sync(tmp_path)

    def fsync(file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(OSError) if is_refused or path.is_file() else contextlib.nullcontext():
            sync(path)


def test_a_hash_is_of_the_whole_file(monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 2)
    file = io.BytesIO(b"abc")
    file.seek(1)
    assert sha256_of(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_file_that_is_named_by_an_argument_is_no_device(tmp_path: Path) -> None:
    """`--json /dev/full` of root would delete the device, and `--json /dev/stdout` a link of the system's."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/proc/self/fd/1")
    for file in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with refuses("--json", "device"):
            refuse_folder("--json", file)
    (tmp_path / "old.json").write_text("{}")
    refuse_folder("--json", tmp_path / "old.json")
    refuse_folder("--json", tmp_path / "new.json")
