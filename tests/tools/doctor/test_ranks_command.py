"""The command in processes of its own: machines that could not train, and ranks that differ."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import MAIN, QUICK, TOY, popen, run
from support.faults import free_port
from support.messages import refuses

from trainer.tools.doctor.__main__ import run as doctor

DOCTOR = [sys.executable, "-m", "trainer.tools.doctor"]


def errors(text: str, level: str = "error") -> dict[str, str]:
    """The lines of a level, by their subject."""
    return dict(re.findall(rf"^{level} +(.+?): (.*)$", text, re.MULTILINE))


def namespaces() -> list[str]:
    words = ["unshare", "--net", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces of our own")
    return words


@pytest.mark.slow
def test_ranks_of_one_machine_that_can_train(tmp_path):
    done = run(["--devices", "2", "--json", "found.json"], tmp_path, DOCTOR)
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.code == 0 and found["ok"], done.out
    assert "2 connected and summed" in done.out and done.err == ""
    assert done.out.splitlines()[-1].startswith("2 rank(s) on 1 machine(s): training can start")
    assert found["ranks"].keys() == {"0", "1"}
    assert {"torch", "memory", "open files", "disk of .", "GPUs"} <= {each["subject"] for each in found["ranks"]["0"]}
    assert sorted(os.listdir(tmp_path)) == ["found.json"]


def test_without_any_package_the_facts_are_there_and_torch_is_missing(tmp_path):
    bare = [sys.executable, "-S", "-m", "trainer.tools.doctor"]  # without site-packages
    done = run(["--devices", "2"], tmp_path, bare)
    assert done.code == 1 and done.err == ""
    assert done.out.count("ok       processor: ") == 1
    assert "No module named 'torch'" in errors(done.out)["torch"]
    assert done.out.count(" reached no other rank: No module named 'torch'") == 2
    assert "nvidia-ml-py is missing" in done.out


@pytest.mark.slow
def test_without_a_loopback_with_a_tiny_shm_and_few_files(tmp_path):
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && ulimit -n 64 && exec "$@"'
    done = run(["--devices", "2"], tmp_path, [*namespaces(), "sh", "-c", script, "sh", *DOCTOR])
    assert done.code == 1 and done.err == ""
    found = errors(done.out)
    assert found.keys() == {"loopback", "/dev/shm", "open files"}
    assert found["loopback"].startswith("down; ranks of one machine can't connect; switch it on by `ip link set lo up`")
    assert found["/dev/shm"].startswith("64 KiB free of 64 KiB; the locks of data workers fill it; enlarge it")
    assert found["open files"].startswith("64 (ulimit -n); a rank of")
    assert done.out.splitlines()[-1].endswith("3 error(s): training can't start; 0 warning(s)")


def start(rank: int, cwd: Path, port: int, files: int, **more: str) -> "subprocess.Popen[str]":
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    more |= {key: str(value) for key, value in env.items()} | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return popen(["--timeout", "40"], cwd, ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *DOCTOR], **more)


@pytest.mark.slow
def test_ranks_with_other_limits_and_variables_are_named(tmp_path):
    port = free_port()
    ranks = [start(0, tmp_path, port, 4096, NCCL_DEBUG="INFO"), start(1, tmp_path, port, 70, NCCL_ALGO="Ring")]
    try:
        (out, err), other = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1] and (err, other) == ("", ("", ""))
    assert errors(out).keys() == {"open files"} and errors(out)["open files"].endswith("[rank 1]")
    differ = errors(out, "warning")
    assert differ["variables differs"].startswith("NCCL_DEBUG=INFO (rank 0) | NCCL_ALGO=Ring (rank 1); ")
    assert "4096 (rank 0) | 70 (rank 1); the rank with the least fails first" in differ["open files differs"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--devices", "0"], "echelon: --devices=0: must be at least 1\n"),
        (["--timeout", "0"], "echelon: --timeout=0.0: must be more than 0\n"),
    ],
)
def test_an_argument_that_can_not_work_is_one_line(tmp_path, words, line):
    done = run(words, tmp_path, DOCTOR)
    assert (done.code, done.out, done.err) == (78, "", line)


def test_a_folder_is_no_file_to_write():
    with refuses("--json=.", "folder"):
        doctor(None, Path(), Path(), 1.0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_error_ends_a_run_and_less_does_not(tmp_path):
    """The same machine, seen by the doctor and by a run with two ranks and data workers."""
    for files, shared, trains in ((64, "1g", False), (96, "4m", True), (4096, "64k", False)):
        script = (
            f'mount -t tmpfs -o size={shared} tmpfs /dev/shm && ip link set lo up && ulimit -n {files} && exec "$@"'
        )
        wrap = [*namespaces(), "sh", "-c", script, "sh"]
        seen = run(["--devices", "2"], tmp_path, [*wrap, *DOCTOR])
        words = [*TOY, *QUICK, "trainer.devices=2", "data.workers=2", "trainer.max_steps=3", "trainer.restarts=0"]
        done = run(words, tmp_path, [*wrap, *MAIN])
        assert (seen.code == 0, done.code == 0) == (trains, trains), (files, shared, seen.out, done.err)
