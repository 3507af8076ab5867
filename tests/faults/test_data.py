"""Shards that change before a run, or go away during it: refused, waited for, or given up in one line."""

import gzip
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shard_recipe import write_points
from support.cli import QUICK, ROOT, Result, lines, popen, run, weights
from support.faults import alive, tidy, wait_for
from support.http import Proxy, needs_nginx, served

from trainer.data.sampling.order import Order

MODULE = [sys.executable, "-m", "trainer.tools.shards"]
TARS = ["--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=tars", *QUICK, "trainer.max_steps=10"]
TARS += ["trainer.validate_every=null", "data.workers=1", "data.shuffle_shards=1"]


def train(name: str, cwd: Path, *more: str, shards: str = "data/p-*.tar", timeout_s: float = 60, **env: str) -> Result:
    words = [*TARS, f"recipe.shards='{shards}'", f"trainer.run_dir=runs/{name}", *more]
    return run(words, cwd, timeout_s=timeout_s, **env)


def same(name: str, cwd: Path, step: int = 10, launchers: int = 0) -> None:
    assert lines(cwd / "runs" / name) == lines(cwd / "runs" / "well")
    assert weights(name, cwd, step) == weights("well", cwd, step)
    assert not (cwd / "runs" / name / "quarantine.jsonl").exists()
    tidy(cwd, name, launchers=launchers)


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, their index, and a run in which nothing happens to them."""
    folder = tmp_path_factory.mktemp("well")
    write_points(folder / "data")
    done = train("well", folder)
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def folder(well: Path, tmp_path: Path) -> Path:
    return shutil.copytree(well, tmp_path, symlinks=True, dirs_exist_ok=True)


@pytest.mark.slow
def test_34_a_shard_that_changed_since_it_was_indexed(folder: Path) -> None:
    path = folder / "data" / "p-000003.tar"
    os.utime(path)
    assert train("touched", folder).code == 0
    same("touched", folder)
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    done = train("changed", folder)
    assert done.code == 78 and done.err.count("\n") == 1
    assert done.err.startswith("echelon: data/p-000003.tar: changed since it was indexed, it has another sha256; ")
    again = run(["index", "data/p-000003.tar"], folder, MODULE)
    assert again.code == 0, again.err
    assert train("indexed", folder).code == 0


@pytest.mark.slow
def test_36_a_shard_that_is_away_for_three_seconds(folder: Path) -> None:
    done = train("away", folder, "recipe.trouble=away")
    assert done.code == 0, done.err
    same("away", folder)


SLOW = ["trainer.devices=3", "trainer.max_steps=16", "trainer.timeout_s=16", "trainer.log_every_steps=1"]
SLOW += ["data.shuffle_shards=3", "data.shuffle_window=4", "+callbacks=[probe]", "callbacks.probe.step_s=0.4"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 4 samples each, for 40 steps of an epoch, and a run of 16 of these."""
    folder = tmp_path_factory.mktemp("many")
    write_points(folder / "data", 480, 4)
    done = train("well", folder, *SLOW)
    assert done.code == 0, done.err
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("gone", "checkpoint"), [("all", 4), ("one", 100)])
def test_36_shards_that_are_away_for_longer_than_they_are_waited_for(
    many: Path, tmp_path: Path, gone: str, checkpoint: int
) -> None:
    """Three ranks end, start again while the shards are still away, end, and go on when they are back; where there is
    no checkpoint and one shard is away, none begins anew on the others."""
    folder = shutil.copytree(many, tmp_path, symlinks=True, dirs_exist_ok=True)
    path = folder / "data" / ("" if gone == "all" else f"p-{eighth():06d}.tar")
    words = [*TARS, "recipe.shards='data/p-*.tar'", f"trainer.run_dir=runs/{gone}", *SLOW]
    run_dir = folder / "runs" / gone
    with popen([*words, f"trainer.checkpoint.every_steps={checkpoint}"], folder) as process:
        try:
            wait_until(lambda: len(texts(run_dir / "metrics.jsonl")) >= (5 if gone == "all" else 1))
            path.rename(folder / "aside")
            wait_until(lambda: len(texts(run_dir / "logs" / "events.jsonl")) == 2)
            (folder / "aside").rename(path)
            _, err = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 0, err
    first, second = (json.loads(text)["failed"] for text in texts(run_dir / "logs" / "events.jsonl"))
    assert "No such file or directory, for 8 s; check the disk" in first and "Traceback" not in err
    assert ("data/p-*.tar: no such file; " if gone == "all" else "recipe.data: has changed since ") in second
    same(gone, folder, 16)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_36_a_shard_whose_reads_never_end_for_a_while(many: Path, tmp_path: Path) -> None:
    """Three ranks end, and go on when it can be read."""
    folder = shutil.copytree(many, tmp_path, symlinks=True, dirs_exist_ok=True)
    path, run_dir = folder / "data" / f"p-{eighth():06d}.tar", folder / "runs" / "hung"
    words = [*TARS, "recipe.shards='data/p-*.tar'", "trainer.run_dir=runs/hung", *SLOW, "trainer.timeout_s=8"]
    with popen([*words, "trainer.checkpoint.every_steps=4"], folder) as process:
        try:
            wait_until(lambda: len(texts(run_dir / "metrics.jsonl")) >= 1)
            path.rename(folder / "aside")
            os.mkfifo(path)
            wait_until(lambda: len(texts(run_dir / "logs" / "events.jsonl")) == 1)
            (folder / "aside").replace(path)
            _, err = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 0, err
    (failed,) = (json.loads(text)["failed"] for text in texts(run_dir / "logs" / "events.jsonl"))
    assert "trainer.timeout_s=8: a data worker gave no batch in this time; " in failed
    same("hung", folder, 16)


def eighth() -> int:
    """A shard of the eighth step."""
    return Order([4] * 120, 0, 3, 4).local(7 * 12, 8 * 12, 0, 1)[0].shard


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def texts(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_36_a_shard_whose_reads_never_end(folder: Path) -> None:
    done = train("hung", folder, "recipe.trouble=fifo", "trainer.timeout_s=3")
    assert done.code == 69 and done.err.count("\n") == 1, done.err
    assert done.err.startswith("echelon: trainer.timeout_s=3: a data worker gave no batch in this time; ")


PROGRAM = """
echo $$ >> started
gzip -dc "$1" | (head -c 3000; sleep 0.1; cat)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_on_programs_with_little_room_killed_while_these_write(tmp_path: Path) -> None:
    """And run again, from compressed files: the bits of the same ranks on plain ones."""
    ranks = ["trainer.devices=2", "data.shuffle_shards=4"]
    paths = write_points(tmp_path / "data")
    assert train("well", tmp_path, *ranks).code == 0
    (tmp_path / "packed").mkdir()
    for path in paths:
        (tmp_path / "packed" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "program").write_text(PROGRAM)
    words = [*TARS, *ranks, "data.allow_pipe=true", f"data.cache_gb={3.5 * paths[0].stat().st_size / 1e9}"]
    words += ["trainer.run_dir=runs/far", "trainer.resume=auto", "trainer.checkpoint.every_steps=2"]
    words += ["recipe.shards='pipe:sh program packed/p-{000000..000011}.tar.gz'"]
    with popen(words, tmp_path, HOME=str(tmp_path)) as process:
        wait_for(tmp_path / "ckpt" / "far" / "step-00000002")
        before, deadline = len(started(tmp_path)), time.monotonic() + 60
        while len(started(tmp_path)) == before:
            assert process.poll() is None and time.monotonic() < deadline
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 10
    while any(map(alive, started(tmp_path))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert max(int(path.name[-8:]) for path in (tmp_path / "ckpt" / "far").glob("step-*")) < 10
    done = run(words, tmp_path, timeout_s=110, HOME=str(tmp_path))
    assert done.code == 0 and "resumed from" in done.out, done.err
    same("far", tmp_path, launchers=1)


def started(cwd: Path) -> list[int]:
    return list(map(int, (cwd / "started").read_text().split()))


@pytest.mark.slow
@needs_nginx
def test_two_ranks_on_remote_shards_with_little_room(tmp_path: Path) -> None:
    """Cut connections, and a cache of a few shards: the bits of the same ranks on the files."""
    ranks = ["trainer.devices=2", "data.shuffle_shards=4"]
    write_points(tmp_path / "data")
    assert train("well", tmp_path, *ranks).code == 0
    (tmp_path / "web").mkdir()
    with served(tmp_path / "web") as proxy:
        paths = write_points(tmp_path / "web" / "www")
        proxy.cut, proxy.faults = 5_000, 6
        room = f"data.cache_gb={3.5 * paths[0].stat().st_size / 1e9}"
        done = train("far", tmp_path, *ranks, room, shards=f"{proxy.url}/p-{{000000..000011}}.tar", HOME=str(tmp_path))
        assert done.code == 0, done.err
        assert len(proxy.requests) > 12 + 6
    same("far", tmp_path)


def away(proxy: Proxy, metrics: Path, seconds: float, steps: list[int]) -> None:
    """nginx is killed once a step is made, and comes back after so many seconds. `steps`: made by then."""

    def made() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    while not made():
        time.sleep(0.02)
    proxy.nginx.kill()
    time.sleep(seconds)
    steps.append(made())
    proxy.nginx.start()


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_nginx
@pytest.mark.parametrize(("ranks", "more", "away_s"), [(1, [], 40), (2, ["trainer.timeout_s=20"], 45)])
def test_a_server_that_is_away_for_long(tmp_path: Path, ranks: int, more: list[str], away_s: float) -> None:
    """It is waited for; for longer than `trainer.timeout_s`, the run is started again. The bits of the files."""
    both = [f"trainer.devices={ranks}", "data.shuffle_shards=4", "trainer.checkpoint.every_steps=1"]
    write_points(tmp_path / "data")
    assert train("well", tmp_path, *both, timeout_s=200).code == 0
    (tmp_path / "web").mkdir()
    with served(tmp_path / "web") as proxy:
        size = write_points(tmp_path / "web" / "www")[0].stat().st_size
        proxy.bytes_per_s = size  # a second each
        far = [f"data.cache_gb={6.5 * size / 1e9}", f"trainer.restarts={3 * (ranks - 1)}"]
        shards, steps = f"{proxy.url}/p-{{000000..000011}}.tar", list[int]()
        outage = threading.Thread(target=away, args=(proxy, tmp_path / "runs/far/metrics.jsonl", away_s, steps))
        outage.start()
        done = train("far", tmp_path, *both, *more, *far, shards=shards, timeout_s=300, HOME=str(tmp_path))
        outage.join()
    assert done.code == 0 and steps[0] < 10, done.err
    assert ("restart 1 of 3" in done.err) == (ranks == 2), done.err
    same("far", tmp_path)
