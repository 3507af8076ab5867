"""echelon shards: packing, indexing in parallel, verifying, and what it says of what it can't do."""

import gzip
import io
import json
import os
import pwd
import re
import shlex
import signal
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load
from support.cli import ROOT, Result, run
from support.messages import refuses

from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.index_file import content_of
from trainer.data.shards.parquet import of_rows
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.errors import DataError
from trainer.tools.shards import compare, main, pack

MODULE = "trainer.tools.shards"


def shards(*words: object, cwd: Path) -> Result:
    return run([*map(str, words)], cwd, MODULE)


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


def test_a_folder_is_packed_in_the_order_of_names(files, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["shards", "pack", str(files), str(tmp_path / "two"), "--per-shard", "2"])
    assert main() == 0  # another interpreter than the next, with other hashes
    done = shards("pack", files, "one", "--per-shard", 2, cwd=tmp_path)
    assert done.code == 0, done.err
    told = [f"packed train-00000{i}.tar: {samples} samples" for i, samples in enumerate((2, 4, 5))]
    assert done.out.splitlines() == [*told, "3 shards: one/train-000000.tar to one/train-000002.tar"]
    assert "left out, since it has no extension: " in done.err and "README" in done.err
    found = read(tmp_path / "one")
    assert list(found["train-000000.tar"]) == ["a/0.cls", "a/0.txt", "a/1.cls", "a/1.txt"]
    assert found["train-000002.tar"] == {"b.txt": b"b"}
    for path in (tmp_path / "one").glob("*.tar"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_bytes_are_packed_as_they_are(tmp_path):
    """Those that are packed already, too; what is given as an object is packed to the same bytes at any time."""
    (tmp_path / "files").mkdir()
    contents = {"a.json.gz": gzip.compress(b"{}"), "a.txt": b"\xff\r\n", "b.tar.gz": b"no gzip"}
    for name, content in contents.items():
        (tmp_path / "files" / name).write_bytes(content)
    assert shards("pack", "files", "out", cwd=tmp_path).code == 0
    assert read(tmp_path / "out")["train-000000.tar"] == contents
    parquet(tmp_path / "a.parquet", {"a.gz": [b"1"]})
    assert list(of_rows(tmp_path / "a.parquet")) == [{"__key__": "000000000000", "a.gz": b"1"}]
    written = []
    for second in (1e9, 2e9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda second=second: second)
            samples = [{"__key__": "0", "__url__": "x", "json.gz": {"x": 1}, "txt.gz": "text", "cls": 3}]
            [path] = write_shards(samples, tmp_path / f"{second}", "p", per_shard=1)
        written.append(path.read_bytes())
    assert written[0] == written[1]
    found = read(tmp_path / f"{second}")["p-000000.tar"]
    assert gzip.decompress(found.pop("0.json.gz")) == b'{"x": 1}' and found == {"0.cls": b"3", "0.txt.gz": b"text"}


@pytest.mark.parametrize("extension", ["_b", "", "pt", "seg.PKL", "pickle"])
def test_members_that_nobody_could_read_are_refused(tmp_path, extension):
    """At once, and with no part left, whatever they come from."""
    (tmp_path / "files").mkdir()
    for name in ("a.txt", f"b.{extension}"):
        (tmp_path / "files" / name).write_text("1")
    done = shards("pack", "files", "out", "--per-shard", 1, cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (71, 1), done.err
    assert done.err.startswith(f"echelon: files/b.{extension}: ") and not list(tmp_path.glob("out/*"))
    with pytest.raises(DataError, match=rf"p-000000\.tar: 'a'\.{extension}: "):
        write_shards([{"__key__": "a", extension: b"1"}], tmp_path / "own", "p", per_shard=1)
    assert not list((tmp_path / "own").iterdir())


@pytest.mark.parametrize(
    "name", ["WhatsApp Image 2023-01-05 at 10.15.30.jpeg", "IMG.2023.jpg", "v.final.2.jpg", "a.b c.jpg"]
)
def test_a_name_of_which_the_key_is_a_part_is_refused(tmp_path, name):
    """Twelve photos of one hour became two samples, whose members no decoder knows."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).write_text("1")
    with pytest.raises(DataError, match=rf"{re.escape(name)}: a key ends at the first dot, so this is .*; rename it "):
        pack(tmp_path / "files", tmp_path / "out", "train", 1, classes=False)


def test_what_systems_put_into_a_folder_is_no_sample(tmp_path, capsys):
    """As in a zip from a Mac, which Windows and Jupyter have opened."""
    ours = ["__MACOSX/a/._1.jpg", ".DS_Store", "a/Thumbs.db", "desktop.ini", "a/.ipynb_checkpoints/1-checkpoint.jpg"]
    for name in ["a/1.jpg", "b/1.jpg", *ours]:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_text(name)
    pack(tmp_path / "files", tmp_path / "out", "train", 9, classes=True)
    assert {name for name in read(tmp_path / "out")["train-000000.tar"] if "jpg" in name} == {"a/1.jpg", "b/1.jpg"}
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["a", "b"]
    said = capsys.readouterr().err
    assert all(f"left out, since it is hidden, or a system's own: {tmp_path}/files/{name}\n" in said for name in ours)


def test_a_folder_per_class_gives_each_sample_its_class(tmp_path):
    """In an order that mixes the classes. Images stay the bytes they are. A second split keeps the numbers."""
    for split, images in (("train", 20), ("val", 3)):
        for name in ("cat", "ant", "bee") if split == "train" else ("cat",):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(images):
                (tmp_path / "photos" / split / name / f"{i}.jpg").write_bytes(f"{name} {i}".encode())
    for words in (["photos/train", "out", "--per-shard", 20], ["photos/val", "out", "--prefix", "val"]):
        done = shards("pack", *words, "--classes", cwd=tmp_path)
        assert done.code == 0, done.err
    names = json.loads((tmp_path / "out" / "classes.json").read_text())
    assert names == ["ant", "bee", "cat"]
    found = read(tmp_path / "out")
    assert [len(members) for members in found.values()] == [40, 40, 40, 6]
    for members in found.values():
        for name, content in members.items():
            if name.endswith(".jpg"):
                label = int(members[name.replace(".jpg", ".cls")])
                assert content.decode() == f"{names[label]} {Path(name).stem}" and name.startswith(f"{names[label]}/")
    train = [{content for name, content in found[shard].items() if name.endswith("cls")} for shard in list(found)[:3]]
    assert train == [{b"0", b"1", b"2"}] * 3
    again = shards("pack", "photos/train", "again", "--per-shard", 20, "--classes", cwd=tmp_path)
    assert again.code == 0 and read(tmp_path / "again").items() <= found.items()


def test_lines_are_samples(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": [2, "\u00e9"]}\n')
    assert shards("pack", "a.jsonl", "out", "--prefix", "p", cwd=tmp_path).code == 0
    members = read(tmp_path / "out")["p-000000.tar"]
    assert [json.loads(content) for content in members.values()] == [{"x": 1}, {"x": [2, "\u00e9"]}]


def parquet(path: Path, columns: dict[str, Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_rows_are_samples(tmp_path):
    """Columns of bytes are members, all others one of JSON."""
    columns = {
        "i": [1, -2, 1 << 60], "f": [0.5, None, 1e300], "s": ["\u00e9", "", None], "on": [True, False, None],
        "l": [[1, 2], [], None], "st": [{"a": [1.5]}, {"a": None}, None], "n": [None] * 3,
        "JPG": [b"\xff\0", b"", None], "seg.png": pyarrow.array([b"ab", b"cd", b"ef"], pyarrow.binary(2)),
    }  # fmt: skip
    parquet(tmp_path / "a.parquet", columns)
    done = shards("pack", "a.parquet", "out", "--per-shard", 2, cwd=tmp_path)
    assert done.code == 0, done.err
    reader = ShardReader(Index.open(find_shards(str(tmp_path / "out/*.tar"))))
    raw = [member for tar in read(tmp_path / "out").values() for member in tar.items()]
    assert [(name, content) for name, content in raw if not name.endswith(".json")] == [
        ("000000000000.jpg", b"\xff\0"), ("000000000000.seg.png", b"ab"), ("000000000001.jpg", b""),
        ("000000000001.seg.png", b"cd"), ("000000000002.seg.png", b"ef"),
    ]  # fmt: skip
    plain = [name for name in columns if name not in ("JPG", "seg.png")]
    rows = [dict(zip(plain, row)) for row in zip(*(columns[name] for name in plain))]
    assert [json.loads(content) for name, content in raw if name.endswith(".json")] == rows
    assert reader.index.counts == [2, 1]
    parquet(tmp_path / "b.parquet", {"bin": [b"a", None]})
    found = list(of_rows(tmp_path / "b.parquet"))
    assert found == [{"__key__": "000000000000", "bin": b"a"}, {"__key__": "000000000001", "json": {}}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"x": 1}\n{', "echelon: a.jsonl: line 2 is not JSON "),
        ("a.csv", "1", "echelon: a.csv: is not a folder, .jsonl or .parquet"),
        ("none", None, "echelon: none: does not exist"),
        ("a.parquet", "PAR1", "echelon: a.parquet: can't be read ("),
        ("empty.jsonl", "", "echelon: empty.jsonl: has no sample; give files KEY.EXTENSION, lines or rows"),
    ],
)
def test_what_can_not_be_packed_is_one_line(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    done = shards("pack", name, "out", cwd=tmp_path)
    assert done.code == 71 and done.err.startswith(said) and done.err.count("\n") == 1
    assert not list(tmp_path.glob("out/*.tar"))


@pytest.fixture
def tool(capsys, monkeypatch, tmp_path):
    """The command in this process, in a folder of its own: gives its exit code, and its one line."""

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shards", *map(str, words)])
        return main(), capsys.readouterr().err

    handler = signal.getsignal(signal.SIGINT)
    yield call
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["a.jsonl", "file"], 71, "file: File exists; make room or make it writable, or give another folder"),
        (
            ["a.jsonl", "file/sub"],
            71,
            "file/sub: Not a directory; make room or make it writable, or give another folder",
        ),
        (
            ["a.jsonl", "/proc/none"],
            71,
            "/proc/none: No such file or directory; make room or make it writable, or give another folder",
        ),
        (
            ["none.jsonl", "out"],
            71,
            "none.jsonl: does not exist; give a folder, a .jsonl or a .parquet",
        ),
        (["none", "out", "--classes"], 71, "none: does not exist; give a folder, a .jsonl or a .parquet"),
        (["a.jsonl", "out", "--classes"], 71, "a.jsonl: --classes takes a folder with a folder per class"),
        (
            ["a.jsonl", "out", "--prefix", "sub/x"],
            78,
            "--prefix=sub/x: is not the name of a file; give folders by FOLDER",
        ),
    ],
)
def test_a_place_that_takes_no_shard_is_one_line(tool, tmp_path, words, code, said):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "file").touch()
    assert tool("pack", *words) == (code, f"echelon: {said}\n")


@pytest.mark.slow
def test_a_parquet_that_is_damaged_inside_is_one_line(tool, tmp_path):
    parquet(tmp_path / "good.parquet", {"s": [f"{i} \u00e9" for i in range(5000)], "b": [b"x" * 50] * 5000})
    good, told = (tmp_path / "good.parquet").read_bytes(), []
    for at in range(4, len(good) - 8, len(good) // 20):
        (tmp_path / "a.parquet").write_bytes(good[:at] + bytes(16) + good[at + 16 :])
        code, said = tool("pack", "a.parquet", f"out{at}")
        assert code == 0 or (code, said.count("\n")) == (71, 1), said
        told += [said] * (code != 0)
    assert len(told) > 2 and all(said.startswith("echelon: a.parquet: can't be read (") for said in told)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://[::1/x.tar?sig=s3cr3t", "http://[::1/x.tar?***: is not a valid URL (Invalid IPv6 URL); correct it"),
        ("http://u:s3cr3t@[x]/x.tar", "http://***@[x]/x.tar: is not a valid URL ("),
    ],
)
def test_what_is_no_url_is_one_line(tool, url, said):
    code, told = tool("index", url)
    assert (code, told.count("\n")) == (78, 1) and told.startswith(f"echelon: {said}")


def test_without_a_home(tool, tmp_path, monkeypatch):
    """And without an entry among the users: the index is beside the shard, and a cache must be given."""
    write_shards([{"__key__": "0", "cls": 0}], tmp_path, "p", per_shard=1)
    (tmp_path / "q.tar.gz").write_bytes(gzip.compress((tmp_path / "p-000000.tar").read_bytes()))
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: {}["none"])
    assert tool("index", "p-000000.tar") == (0, "")
    assert tool("verify", "p-000000.tar") == (0, "")
    told = (
        "echelon: data.cache_dir=~/.cache/echelon/shards: there is no home folder; give another folder, or set HOME\n"
    )
    assert tool("index", "q.tar.gz") == (78, told)
    assert tool("index", "q.tar.gz", "--cache-dir", "cache") == (0, "")
    (tmp_path / "p-000000.tar.idx").unlink()
    (tmp_path / "p-000000.tar.idx").mkdir()
    code, told = tool("index", "p-000000.tar")
    assert code == 71 and "its index can't be stored" in told
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".")[0] == "cache"


def test_the_commands_of_the_page(tool, tmp_path):
    (tmp_path / "photos").mkdir()
    for i in range(20):
        (tmp_path / "photos" / f"{i}.cls").write_text(str(i))
    page = (ROOT / "docs" / "samples.md").read_text().partition("## Pack what you have")[0]
    commands = [c for c in re.findall(r"^echelon shards (.*?)(?: +#.*)?$", page, re.M) if "--classes" not in c]
    assert [command.split()[0] for command in commands] == ["pack", "index", "verify", "stat"]
    for command in commands:
        assert tool(*shlex.split(command))[0] == 0, command
    assert len(list((tmp_path / "shards").glob("*.idx"))) == 3


def test_index_verify_stat(files, tmp_path):
    shards("pack", files, "out", "--per-shard", 1, cwd=tmp_path)
    done = shards("index", "out/*.tar", "--workers", 3, cwd=tmp_path)
    assert done.code == 0 and done.out.count("indexed train-00000") == 5
    fingerprint = Index.open(find_shards(str(tmp_path / "out/*.tar"))).fingerprint[:16]
    assert f"5 shards, 5 samples, fingerprint {fingerprint}" in done.out
    assert shards("index", "out/*.tar", cwd=tmp_path).out.count("indexed") == 0  # they are stored
    assert (
        f"all: 5 samples, 0.051 MB, 10.240 kB a sample, fingerprint {fingerprint}"
        in shards("stat", "out/train-{000000..000004}.tar", cwd=tmp_path).out
    )
    assert shards("verify", "out/*.tar", cwd=tmp_path).code == 0
    path = tmp_path / "out" / "train-000003.tar"
    content, times = bytearray(path.read_bytes()), path.stat()
    content[600] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk that rots would leave it
    done = shards("verify", "out/*.tar", cwd=tmp_path)
    assert done.code == 71 and "train-000003.tar: DIFFERS from its index" in done.out
    assert done.err.startswith("echelon: out/train-000003.tar: differ from their index; restore")


def test_verify_reads_the_index_too(tmp_path):
    """Of which a row has a flipped bit, or says, with a checksum that is right, what is not so."""
    [path] = write_shards(({"__key__": str(i), "cls": i} for i in range(5)), tmp_path, "p", per_shard=5)
    known = Index.open([path]).shards[0]
    good = known.index_path.read_bytes()
    assert compare(path) == ""
    known.index_path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert compare(path) == "has no index that can be read"
    rows = load(good)["samples"]
    rows[2, 1] -= 512
    known.index_path.write_bytes(content_of(known, rows))
    assert Index.open([path]).shards == [known]
    assert compare(path) == f"its index is wrong: remove {known.index_path}"
    known.index_path.unlink()
    Index.open([path])
    assert compare(path) == ""


def test_many_threads_index_as_one(files, tmp_path):
    shards("pack", files, "out", "--per-shard", 1, cwd=tmp_path)
    paths = find_shards(str(tmp_path / "out/*.tar"))
    told: list[int] = []
    one = Index.open(paths, lambda _, done, total: told.append(done), workers=1).shards
    for path in (tmp_path / "out").glob("*.idx"):
        path.unlink()
    many = Index.open(paths, workers=5).shards
    assert [shard.sha256 for shard in one] == [shard.sha256 for shard in many] and told == sorted(told)


@pytest.mark.slow
def test_names_of_files_steer_no_terminal(tmp_path: Path) -> None:
    """Escapes, a forged line, bytes that are no UTF-8: in names of shards, in names of files to pack, and in errors."""
    odd = os.fsdecode(b"\x1b[31m\nFORGED \xff")
    (tmp_path / "files").mkdir()
    for name in ("a.cls", f"{odd}.cls", f"{odd} left out"):
        (tmp_path / "files" / name).write_text("1")
    told = [shards("pack", "files", "out", "--prefix", odd, cwd=tmp_path)]
    packed = tmp_path / "out" / f"{odd}-000000.tar"
    for word in ("index", "stat", "verify"):
        told.append(shards(word, packed, cwd=tmp_path))
    assert [done.code for done in told] == [0] * 4, told
    packed.write_bytes(packed.read_bytes()[:600])
    told += [shards(word, packed, cwd=tmp_path) for word in ("verify", "stat", "index")]
    assert [done.code for done in told[4:]] == [71, 78, 71], told
    lines = [line for done in told for line in (done.out + done.err).splitlines()]
    assert len([line for line in lines if "?[31m?FORGED ?" in line]) >= 10
    assert not [line for line in lines if line.startswith("FORGED") or not line.isprintable()]


def test_pack_writes_to_no_url_and_leaves_no_file_out(tmp_path):
    """Not into a folder `s3:`; a pipe in the folder may be meant, and is no file."""
    folder = tmp_path / "samples"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    with refuses("FOLDER=s3:/b/out", "URL"):
        pack(folder, Path("s3://b/out"), "train", 10, False)
    os.mkfifo(folder / "b.txt")
    with pytest.raises(DataError, match=r"b.txt: is a pipe, a socket or a device; take it out of the folder"):
        pack(folder, tmp_path / "out", "train", 10, False)
