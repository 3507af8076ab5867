"""What is not what was written is refused: flipped bits, cut files, links, forged manifests, a disk that can't read."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import NAMES, put, steps
from support.messages import refuses

from trainer.checkpoint.commit import commit
from trainer.checkpoint.locate import newest, resolve
from trainer.checkpoint.manifest import MANIFEST, Damaged, verify
from trainer.errors import exit_code


def test_every_flipped_bit_is_seen(run: Path) -> None:
    files = {"a.bin": memoryview(bytes(range(40)))}
    checkpoint = commit(run, 1, files, {"metrics": {"val/loss": 1.25}, "note": "\u00e9 and \n"})
    assert verify(checkpoint)["metrics"] == {"val/loss": 1.25}
    for path in sorted(checkpoint.iterdir()):
        content = path.read_bytes()
        for i in range(0, len(content) * 8, 3):  # every third bit: each place in a byte, and every byte
            flipped = bytearray(content)
            flipped[i // 8] ^= 1 << i % 8
            path.write_bytes(flipped)
            with pytest.raises(Damaged, match=path.name):
                verify(checkpoint)
        path.write_bytes(content)
    verify(checkpoint)


@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
@pytest.mark.parametrize("hashes", [True, False])
def test_files_that_are_not_what_was_written(run: Path, name: str, hashes: bool) -> None:
    path = put(run, 1) / name
    content = path.read_bytes()

    def refused(why: str = "") -> None:
        with pytest.raises(Damaged, match=f"{re.escape(str(path))}: .*{why}"):
            verify(path.parent, hashes)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    for wrong in (b"", content[:-1], content + b"x"):
        path.write_bytes(wrong)
        refused()
    refused("is missing")
    elsewhere = run / "elsewhere"
    elsewhere.write_bytes(content)
    path.symlink_to(elsewhere)
    refused("symbolic link")
    os.mkfifo(path)
    refused("plain file")
    path.mkdir()
    refused("plain file")
    path.write_bytes(content)
    assert verify(path.parent, hashes)["step"] == 1
    path.write_bytes(content[:-1] + b"?")  # the right size: only hashes see it, and a manifest's own is always compared
    if hashes or name == MANIFEST:
        refused()
    else:
        verify(path.parent, hashes)


def forge(checkpoint: Path, **changes: Any) -> None:
    """A manifest with a sha256 that fits: what an attacker, or another writer, would make."""
    manifest = {**json.loads((checkpoint / MANIFEST).read_text()), **changes}
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "sha256": digest}, indent=1))


def test_forged_manifests(run: Path) -> None:
    checkpoint = put(run, 1)
    entry = json.loads((checkpoint / MANIFEST).read_text())["files"]["state.json"]
    (run / "state.json").write_bytes((checkpoint / "state.json").read_bytes())
    forge(checkpoint, note="fits")
    assert verify(checkpoint)["note"] == "fits"
    bad: list[dict[str, Any]] = [
        {"files": {name: entry}}
        for name in ("../state.json", str(run / "state.json"), "..", ".", "", "a/b", "state.json\n")
    ]
    bad += [
        {"files": {"state.json": wrong}} for wrong in ([5000], [True, entry[1]], ["5000", entry[1]], {}, None, "ab")
    ]
    bad += [{"files": []}, {"files": None}, {"format": 1}, {"format": None}, {"step": 2}, {"step": "1"}, {"step": True}]
    bad += [{"x": float("nan")}, {"x": float("inf")}]
    for changes in bad:
        forge(checkpoint, **changes)
        with pytest.raises(Damaged):
            verify(checkpoint)
        forge(checkpoint, files={"state.json": entry}, format=2, step=1, x=0)
        verify(checkpoint)


@pytest.mark.parametrize(
    "content", [b"{}", b"[]", b"null", b"1", b"NaN", b"\xff\xfe", b"[" * 100_000, b'{"sha256": 1}', b"\0" * 100]
)
def test_garbage_for_a_manifest(run: Path, content: bytes) -> None:
    path = put(run, 1) / MANIFEST
    path.write_bytes(content)
    with pytest.raises(Damaged, match=MANIFEST):
        verify(path.parent)


def test_a_huge_manifest_is_refused(run: Path) -> None:
    checkpoint = put(run, 1)
    for size, fits in ((1 << 20, True), (65 << 20, False)):
        forge(checkpoint, note="x" * size)
        if fits:
            verify(checkpoint)
        else:
            with pytest.raises(Damaged, match=MANIFEST):
                verify(checkpoint)


def test_damage_and_trouble_are_two_things(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files must not make a run forget its checkpoints; a disk that can't read one must."""
    put(run, 1)
    put(run, 2)
    opened = os.open

    def fail(code: int, times: int = 99) -> None:
        failures = iter(range(times))

        def broken(path: Any, *args: Any, **kwargs: Any) -> int:
            inside = kwargs.get("dir_fd") is not None and os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}")
            if inside and "step-00000002" in inside and next(failures, None) is not None:
                raise OSError(code, os.strerror(code), path)
            return opened(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", broken)

    fail(errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        newest(run)
    with pytest.raises(OSError, match="Too many open files") as error:
        resolve("auto", run.parent, run)
    assert exit_code(error.value) == 1  # may pass, so it is started again
    fail(errno.EACCES)
    with refuses("trainer.resume=auto", "Permission denied", "readable", "trainer.resume=null"):
        resolve("auto", run.parent, run)
    assert steps(run) == [1, 2]
    fail(errno.EIO, times=2)
    assert newest(run) == run / "step-00000002"
    fail(errno.EIO)
    assert newest(run) == run / "step-00000001"
