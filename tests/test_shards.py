"""python -m trainer.tools.shards: packing, indexing in parallel, verifying, and what it says of what it can't do."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from command import environment

from trainer.data.find import find_shards
from trainer.data.index import Index


def shards(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.tools.shards", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60)


def read(folder: Path) -> dict[str, dict[str, bytes]]:
    """By tarfile: name of the tar -> name of the member -> content."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found[path.name] = {name: (tar.extractfile(name) or io.BytesIO()).read() for name in tar.getnames()}
    return found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "a").mkdir(parents=True)
    for i in (3, 1, 2, 0):
        (folder / "a" / f"{i}.txt").write_text(f"text {i}")
        (folder / "a" / f"{i}.cls").write_text(str(i))
    (folder / "b.txt").write_text("b")
    (folder / "README").write_text("no sample")
    return folder


def test_a_folder_is_packed_in_the_order_of_names(files, tmp_path):
    for name in ("two", "one"):
        done = shards("pack", files, name, "--per-shard", 2, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "3 shards: one/train-000000.tar to one/train-000002.tar\n"
    assert "left out: " in done.stderr and "README" in done.stderr
    found = read(tmp_path / "one")
    assert list(found["train-000000.tar"]) == ["a/0.cls", "a/0.txt", "a/1.cls", "a/1.txt"]
    assert found["train-000002.tar"] == {"b.txt": b"b"}
    for path in (tmp_path / "one").glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_lines_are_samples(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": [2, "\u00e9"]}\n')
    assert shards("pack", "a.jsonl", "out", "--prefix", "p", cwd=tmp_path).returncode == 0
    members = read(tmp_path / "out")["p-000000.tar"]
    assert [json.loads(content) for content in members.values()] == [{"x": 1}, {"x": [2, "\u00e9"]}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"x": 1}\n{', "echelon: a.jsonl: line 2 is no JSON "),
        ("a.csv", "1", "echelon: a.csv: is no folder, .jsonl or .parquet"),
        ("none", None, "echelon: none: does not exist"),
        ("empty.jsonl", "", "echelon: empty.jsonl: has no sample; give files KEY.EXTENSION, lines or rows"),
    ],
)
def test_what_can_not_be_packed_is_one_line(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    done = shards("pack", name, "out", cwd=tmp_path)
    assert done.returncode == 71 and done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out/*.tar"))


def test_index_verify_stat(files, tmp_path):
    shards("pack", files, "out", "--per-shard", 1, cwd=tmp_path)
    done = shards("index", "out/*.tar", "--workers", 3, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("indexed train-00000") == 5
    fingerprint = Index.open(find_shards(str(tmp_path / "out/*.tar"))).fingerprint[:16]
    assert f"5 shards, 5 samples, fingerprint {fingerprint}" in done.stdout
    assert shards("index", "out/*.tar", cwd=tmp_path).stdout.count("indexed") == 0  # they are stored
    assert (
        f"all: 5 samples, 0.051 MB, 10.240 kB a sample, fingerprint {fingerprint}"
        in shards("stat", "out/train-{000000..000004}.tar", cwd=tmp_path).stdout
    )
    assert shards("verify", "out/*.tar", cwd=tmp_path).returncode == 0
    path = tmp_path / "out" / "train-000003.tar"
    content, times = bytearray(path.read_bytes()), path.stat()
    content[600] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk that rots would leave it
    done = shards("verify", "out/*.tar", cwd=tmp_path)
    assert done.returncode == 71 and "train-000003.tar: NOT what was indexed" in done.stdout
    assert done.stderr.startswith("echelon: out/train-000003.tar: not what was indexed; restore")


def test_many_threads_index_as_one(files, tmp_path):
    shards("pack", files, "out", "--per-shard", 1, cwd=tmp_path)
    paths = find_shards(str(tmp_path / "out/*.tar"))
    told: list[int] = []
    one = Index.open(paths, lambda _, done, total: told.append(done), workers=1).shards
    for path in (tmp_path / "out").glob("*.idx"):
        path.unlink()
    many = Index.open(paths, workers=5).shards
    assert [shard.sha256 for shard in one] == [shard.sha256 for shard in many] and told == sorted(told)
