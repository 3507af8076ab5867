"""Disks: checkpoints that are damaged between two runs; full or read-only for a while; seen by some ranks only."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cli import MAIN, QUICK, popen, run
from support.faults import RUN, beside, events, free_port, resumed, troubling, wait_for, watched, whole
from support.quick import quick
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.checkpoint.manifest import MANIFEST

Change = Callable[[bytes], bytes]


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(at: int) -> Change:
    return lambda content: content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def to(content: bytes) -> Change:
    return lambda _: content


DAMAGES: dict[str, list[tuple[str, Change]]] = {  # of the newest checkpoint, and of the one before
    "23 24 25 weights and a manifest": [("model.safetensors", flip(-5)), (MANIFEST, to(b"{}"))],
    "23 both cut": [("optimizer.safetensors", cut), (MANIFEST, cut)],
    "23 emptied": [("state.json", to(b"")), ("model.safetensors", to(b""))],
    "24 a header": [("model.safetensors", flip(10))],
    "24 a manifest": [(MANIFEST, flip(300))],
    "25 no JSON": [(MANIFEST, to(b"\xff\xfe garbage"))],
}


@pytest.mark.parametrize("damage", quick(DAMAGES))
def test_checkpoints_that_are_damaged_between_two_runs(golden, tmp_path, damage):
    shutil.copytree(golden, tmp_path, dirs_exist_ok=True, symlinks=True)
    folders = [tmp_path / "ckpt" / "r" / f"step-{step:08d}" for step in (12, 8, 4)]
    for folder, (name, change) in zip(folders, DAMAGES[damage]):
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    (tmp_path / "ckpt" / "last.pt").unlink()
    (tmp_path / "ckpt" / "last.pt").symlink_to("last.pt")
    result = run([*RUN, "trainer.resume=auto"], tmp_path, timeout_s=110)
    assert result.code == 0, result.err
    valid = folders[len(DAMAGES[damage])].name
    assert resumed(result.out) == [int(valid[-8:])]
    for folder, (name, _) in zip(folders, DAMAGES[damage]):
        said = rf"damaged checkpoint, going back to {valid}: \S*ckpt/r/{folder.name}/{name}: "
        assert len(re.findall(said, result.out)) == 1
        assert len(list(folder.parent.glob(f".bad-{folder.name}-*"))) == 1
    assert os.readlink(tmp_path / "ckpt" / "last.pt") == "r/step-00000012"
    whole(tmp_path, golden, kept=".bad-step-")


# A folder of its own under the same name, for this process alone. It is not waited for as long as a real one.
SOON = "import trainer.timeouts as v; v.VISIBLE_S = 1.0; from trainer.main import main; main()"
ELSEWHERE = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none ckpt && exec "$@"',
    "sh",
    sys.executable,
    "-c",
    SOON,
]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="not root: no mount that one process alone sees")
def test_30_a_rank_that_does_not_see_the_checkpoint(golden, tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this root may not make mount namespaces")
    shutil.copytree(golden, tmp_path, dirs_exist_ok=True, symlinks=True)
    before = sorted(path.name for path in (tmp_path / "ckpt" / "r").iterdir())
    words = [*RUN, "trainer.devices=auto", "trainer.resume=ckpt/r/step-00000004"]
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [popen(words, tmp_path, ELSEWHERE if n == 1 else MAIN, RANK=str(n), **env) for n in range(3)]
    try:
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [78] * 3
    said = "echelon: trainer.resume=ckpt/r/step-00000004: rank 1 does not see rank 0's checkpoint"
    (line,) = set(told)
    assert line.startswith(f"{said} ({tmp_path}/ckpt/r/step-00000004: is missing); give all ranks")
    assert line.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "ckpt" / "r").iterdir()) == before


def mount(*words: str) -> None:
    if (done := subprocess.run(["mount", *words], capture_output=True, text=True)).returncode:
        pytest.skip(f"this root may not mount: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(folder: Path, *words: str) -> Iterator[None]:
    mount(*words, str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_until(text: str, process: "subprocess.Popen[str]") -> str:
    """What it has printed, with the line that holds `text`."""
    assert process.stdout is not None
    out = ""
    while text not in out.rpartition("\n")[0].rpartition("\n")[2]:
        line = process.stdout.readline()
        assert line, (out, process.communicate())
        out += line
    return out


needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="not root: no disk of a size of its own")
STEPS = [*(word for word in RUN if word not in QUICK), "trainer.max_steps=60", "trainer.checkpoint.max_failures=99"]


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Fill the disk, also with what others free meanwhile."""

    def fill(over: threading.Event) -> None:
        with open(disk / "ballast", "wb", buffering=0) as ballast:
            while not over.wait(0.01):
                with contextlib.suppress(OSError):
                    while not over.is_set():
                        ballast.write(b"x" * 4096)

    with beside(fill):
        yield


@needs_mounts
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_20_a_disk_is_full_for_a_while(tmp_path):
    """All that a run writes is on it. Meanwhile a rank is killed, too."""
    (straight := tmp_path / "straight").mkdir()
    (disk := tmp_path / "disk").mkdir()
    assert run(STEPS, straight, timeout_s=110).code == 0
    with mounted(disk, "-t", "tmpfs", "-o", "size=64m", "none"), watched(disk):
        process = popen([*STEPS, "callbacks.probe.step_s=0.1", *troubling("SIGKILL", step=20)], disk)
        try:
            wait_for(disk / "ckpt" / "r" / "step-00000004")
            with filled(disk):
                out = read_until("step 50/60", process)
            subprocess.run(["mount", "-o", "remount,size=128m", str(disk)], check=True)
            rest, err = process.communicate(timeout=100)
        finally:
            process.kill()
        assert process.returncode == 0, err
        assert "resumed from ckpt/r/step-00000004 at step 4" in out
        failed = out.count("failed, training continues: [Errno 28]")
        assert (
            failed >= 8
            and "No space left on device; training continues" in out
            and "metrics.jsonl: can be written again" in rest
        )
        whole(disk, straight, 60)
        assert [event["rank"] for event in events(disk)] == [1]
        seen = EventAccumulator(str(disk / "runs/r/tensorboard"), size_guidance={"scalars": 0}).Reload()
        assert [event.step for event in seen.Scalars("train/loss")] == list(range(1, 61))
        logged = (disk / "runs" / "r" / "logs" / "rank0.log").read_text()
        assert logged.count("failed, training continues: [Errno 28]") == failed


@needs_mounts
@pytest.mark.slow
def test_21_a_disk_is_read_only_for_a_while(golden, tmp_path):
    """The checkpoints', by a mount over it."""
    process = popen([*RUN, "callbacks.probe.step_s=0.4"], tmp_path)
    folder = str(tmp_path / "ckpt")
    try:
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
        with mounted(tmp_path / "ckpt", "--bind", folder):
            mount("-o", "remount,bind,ro", folder)
            out = read_until("checkpoint of step 8 failed, training continues: [Errno 30] Read-only file", process)
        rest, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert (out + rest).count("failed") == 1
    whole(tmp_path, golden)
