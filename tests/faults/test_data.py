"""Shards that change before a run, or go away during it: refused, waited for, or given up in one line."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from command import QUICK, ROOT, Result, lines, run, weights
from served import MISSING, NGINX, served
from shard_recipe import write_points

MODULE = [sys.executable, "-m", "trainer.tools.shards"]
TARS = ["--config-dir", str(ROOT / "tests" / "toy" / "conf"), "recipe=tars", *QUICK, "trainer.max_steps=10"]
TARS += ["trainer.validate_every=null", "data.workers=1", "data.lanes=1"]


def train(name: str, cwd: Path, *more: str, shards: str = "data/p-*.tar", **env: str) -> Result:
    return run([*TARS, f"recipe.shards='{shards}'", f"trainer.run_dir=runs/{name}", *more], cwd, **env)


def same(name: str, cwd: Path) -> None:
    assert lines(cwd / "runs" / name) == lines(cwd / "runs" / "well")
    assert weights(name, cwd, 10) == weights("well", cwd, 10)
    assert not (cwd / "runs" / name / "quarantine.jsonl").exists()


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


def test_36_a_shard_that_is_away_for_a_second(folder: Path) -> None:
    done = train("away", folder, "recipe.trouble=away")
    assert done.code == 0, done.err
    same("away", folder)


def test_36_a_shard_whose_reads_never_end(folder: Path) -> None:
    done = train("hung", folder, "recipe.trouble=fifo", "trainer.timeout_s=3")
    assert done.code == 71 and done.err.count("\n") == 1, done.err
    assert done.err.startswith("echelon: trainer.timeout_s=3: a data worker gave no batch in this time; ")


@pytest.mark.faults
@pytest.mark.skipif(NGINX is None, reason=MISSING)
def test_two_ranks_on_remote_shards_with_little_room(tmp_path: Path) -> None:
    """Cut connections, and a cache of a few shards: the bits of the same ranks on the files."""
    ranks = ["trainer.devices=2", "data.lanes=4"]
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
