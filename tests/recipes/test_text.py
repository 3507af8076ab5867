"""Text to shards: what is a document, what is refused; nothing lost, split by document, built once, the same bytes."""

import io
import json
import math
import os
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import refuses
from tokenizers.implementations import BertWordPieceTokenizer

from recipes import corpus
from recipes.byte_pairs import END
from recipes.corpus import Settings, pack, prepare
from recipes.text import PIECE, Source
from recipes.wordpiece import CLS, SEP, SPECIALS
from trainer.errors import ConfigError

SMALL = Settings(vocab=300, sequence=16, val_fraction=0.2)
BYTES = replace(SMALL, tokenizer="byte_pairs")
each_tokenizer = pytest.mark.parametrize("settings", [SMALL, BYTES], ids=lambda settings: settings.tokenizer)
TEXTS = {
    f"part{i % 3}/{i}.txt": f"Document {i}: [MASK] <|endoftext|> d\u00e9j\u00e0 Vu, {'na ' * i}\n" * 3
    for i in range(20)
}


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
        os.utime(folder / name, (1, 1))
    return folder


@pytest.fixture(autouse=True)
def tokenizers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build sets it for the rest of the process."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "text", TEXTS)


def sequences(shards: list[Path]) -> list[np.ndarray]:
    """By tarfile and NumPy alone."""
    rows = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            rows += [np.load(io.BytesIO(tar.extractfile(member).read())) for member in tar]
    return rows


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_default_is_the_standard_library_without_tests():
    root = Path(sysconfig.get_path("stdlib"))
    source = Source(None)
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    expected = {p.relative_to(root) for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)}
    assert set(map(Path, source.files)) == expected and Path("json/decoder.py") in expected
    assert list(source.files.values()) == list(Source(None).files.values())


def test_documents_by_kind(tmp_path: Path):
    book = "".join(f"line {i}\n" for i in range(PIECE // 4))
    rows = "\n".join(json.dumps({"text": text, "id": 1}) for text in ("one", " ", "tw\u00f6\ntwo"))
    folder = write(
        tmp_path, {"book.py": book, "rows.jsonl": rows + "\n\n", ".hidden/x": "\0", ".y": "\0", "blank": " \n"}
    )
    (folder / "loop").symlink_to(folder)
    source = Source(str(folder))
    documents = list(source.documents())
    assert source.hidden == 2
    assert [d for d in documents if d.name != "book.py"] == [("rows.jsonl:0", "one"), ("rows.jsonl:2", "tw\u00f6\ntwo")]
    pieces = [d.text for d in documents if d.name == "book.py"]
    assert "".join(pieces) == book and len(pieces) > 2 and all(piece.endswith("\n") for piece in pieces)
    alone = list(Source(str(folder / "book.py")).documents())
    assert [d.name for d in alone] == [f"book.py:{i}" for i in range(len(pieces))]
    both = Source([str(folder / "book.py"), str(folder)])
    assert len(both.files) == 1 + len(source.files)


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, {"a.parquet": "not read"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses("recipe.text", "a.parquet", "'pyarrow>=20,<27'"):
        list(Source(str(tmp_path)).documents())

    class File:  # of pyarrow, what we use
        columns = {"text": ["one", "two"]}

        def __init__(self, path: Path) -> None:
            assert path.name == "a.parquet"

        def iter_batches(self, columns: list[str]):
            values = self.columns[columns[0]]
            yield types.SimpleNamespace(column=lambda _: types.SimpleNamespace(to_pylist=lambda: values))

    fake = types.ModuleType("pyarrow")
    fake.__dict__.update(ArrowException=OSError, parquet=types.SimpleNamespace(ParquetFile=File))
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    assert list(Source(str(tmp_path)).documents()) == [("a.parquet:0", "one"), ("a.parquet:1", "two")]
    for columns in ({"words": ["one"]}, {"text": [None]}):
        monkeypatch.setattr(File, "columns", columns)
        with refuses("recipe.text", "a.parquet", '"text"'):
            list(Source(str(tmp_path)).documents())


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "text does not exist, or is not a file"),
        ({}, "there is no text in it"),
        ({"a.txt": b"", "b.txt": b""}, "there is no text in it"),
        ({"a.txt": b" \n\t"}, "there is no text in it"),
        ({"a.txt": b"fine", "b.bin": b"\x7fELF\0\0"}, "b.bin is binary (NUL at byte 4)"),
        ({"a.txt": b"fine", "b.txt": "caf\u00e9".encode("latin-1")}, "b.txt is not UTF-8 text (byte 3)"),
        ({"a.jsonl": b'{"text": "x"}\n{"txt": "y"}'}, 'a.jsonl, line 2: is not a JSON object with a string "text"'),
        ({"a.jsonl": b'{"text": "\\ud800"}'}, "a.jsonl, line 1: is not a JSON"),
        ({"a.jsonl": b'["text"]'}, "a.jsonl, line 1: is not a JSON"),
        ({"a.jsonl": b"[" * 100_000}, "a.jsonl, line 1: is not a JSON"),
        ({"a.txt": b"alone"}, "one document can't be split"),
    ],
)
def test_refused(files: dict[str, bytes] | None, reason: str, tmp_path: Path):
    folder = tmp_path / "text"
    if files is not None:
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        prepare(str(folder), str(tmp_path / "cache"), SMALL)
    message = str(caught.value)
    assert message.startswith(f"recipe.text={folder}: ") and reason in message and "\n" not in message


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_a_neighbours_pipe_or_link_is_no_lock(make: Callable[[Path], object], folder: Path, tmp_path: Path):
    """To open a pipe would wait for ever."""
    made = prepare(str(folder), str(tmp_path / "good"), SMALL).folder
    (tmp_path / "cache").mkdir()
    make(tmp_path / "cache" / f"{made.name}.lock")
    with refuses("recipe.cache", "lock"):
        prepare(str(folder), str(tmp_path / "cache"), SMALL)


def test_broken_link_and_unwritable_cache(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"recipe\.cache=.*0\.txt/sub.*give a writable folder"):
        prepare(str(folder), str(folder / "part0/0.txt/sub"), SMALL)
    (folder / "gone.txt").symlink_to(tmp_path / "nothing")
    with refuses("recipe.text", "gone.txt"):
        Source(str(folder))


def test_shards_hold_every_token_of_each_split(folder: Path, tmp_path: Path):
    """Against the tokenizers package's own BERT tokenizer, document by document."""
    made = prepare(str(folder), str(tmp_path / "cache"), SMALL)
    reference = BertWordPieceTokenizer(str(made.folder / "vocab.txt"), lowercase=False, strip_accents=False)
    reference._tokenizer.encode_special_tokens = True  # "[MASK]" in the text is no mask
    expected = {name: [*reference.encode(TEXTS[name], add_special_tokens=False).ids, SEP] for name in sorted(TEXTS)}
    assert list(made.vocabulary())[:5] == SPECIALS and "Document" in made.vocabulary()
    assert len(made.vocabulary()) == made.meta["vocabulary"] <= SMALL.vocab

    found: dict[str, list[str]] = {}
    for split in ("train", "val"):
        rows = sequences(made.shards(split))
        assert {(row.dtype.name, len(row), row[0], row[-1]) for row in rows} == {("uint16", 16, CLS, SEP)}
        stream = np.concatenate([row[1:-1] for row in rows]).tolist()
        whole, found[split] = made.meta["tokens"][split], []
        assert 0 <= len(stream) - whole < 14 and stream[whole:] == stream[: len(stream) - whole]  # the last one wraps
        rest = stream[:whole]
        while rest:  # documents differ in their second token, so there is one reading
            name = next(n for n, ids in expected.items() if rest[: len(ids)] == ids)
            found[split].append(name)
            rest = rest[len(expected[name]) :]
    assert sorted(found["train"] + found["val"]) == sorted(TEXTS) and found["val"]

    counts = Counter(i for name in found["train"] for i in expected[name] if i != SEP)
    shares = [n / counts.total() for n in counts.values()]
    assert made.meta["unigram_entropy_nats"] == pytest.approx(-sum(p * math.log(p) for p in shares))

    more = write(folder, {f"more/{i}.txt": f"Even more {i}" for i in range(30)})
    grown = prepare(str(more), str(tmp_path / "cache"), SMALL)
    assert grown.folder != made.folder
    survey = corpus._Survey(Source(str(more)), SMALL)
    again = {split: {d.name for d in survey.documents(split, "")} & TEXTS.keys() for split in found}
    assert again == {split: set(names) for split, names in found.items()}


def test_byte_pairs_give_the_text_back(folder: Path, tmp_path: Path):
    """By the vocabulary alone: a token's text is its bytes, in GPT-2's letters."""
    made = prepare(str(folder), str(tmp_path / "cache"), BYTES)
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in letters]
    byte_of = {chr(byte): byte for byte in letters} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokens = {i: bytes(byte_of[letter] for letter in token) for token, i in made.vocabulary().items() if i != END}
    assert len(tokens) + 1 == len(made.vocabulary()) == made.meta["vocabulary"] == 300
    texts: list[str] = []
    counts: Counter[int] = Counter()
    for split in ("train", "val"):
        rows = sequences(made.shards(split))
        assert {(row.dtype.name, len(row)) for row in rows} == {("uint16", 16)}
        stream = np.concatenate(rows).tolist()
        whole = made.meta["tokens"][split]
        assert 0 <= len(stream) - whole < 16 and stream[whole:] == stream[: len(stream) - whole]
        assert stream[whole - 1] == END
        documents = "".join(map(chr, stream[:whole])).split(chr(END))[:-1]
        texts += [b"".join(tokens[ord(i)] for i in document).decode() for document in documents]
        counts.update(stream[:whole] if split == "train" else [])
    assert sorted(texts) == sorted(TEXTS.values()) and "<|endoftext|>" in texts[0]
    shares = [n / counts.total() for n in counts.values()]
    assert made.meta["unigram_entropy_nats"] == pytest.approx(-sum(p * math.log(p) for p in shares))


@pytest.mark.slow
@each_tokenizer
def test_another_process_builds_the_same_bytes_and_a_hit_imports_nothing(
    settings: Settings, folder: Path, tmp_path: Path
):
    made = prepare(str(folder), str(tmp_path / "cache"), settings)
    script = """
import sys
from recipes.corpus import Settings, prepare
folder, first, second, tokenizer = sys.argv[1:]
hit = prepare(folder, first, Settings(300, 16, 0.2, tokenizer))
assert not {"tokenizers", "transformers", "torch", "rich"} & set(sys.modules)
print(hit.folder, prepare(folder, second, Settings(300, 16, 0.2, tokenizer)).folder)
"""
    arguments = [str(folder), str(tmp_path / "cache"), str(tmp_path / "other"), settings.tokenizer]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    hit, other = map(Path, done.stdout.split())
    assert hit == made.folder and other.name == made.folder.name
    assert contents(other) == contents(made.folder)


def test_built_once_by_many_at_the_same_time(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    builds, build = [], corpus._build

    def slow(*arguments):
        builds.append(1)
        threading.Event().wait(0.2)
        build(*arguments)

    monkeypatch.setattr(corpus, "_build", slow)
    made: list[Path] = []
    tasks = [
        threading.Thread(target=lambda: made.append(prepare(str(folder), str(tmp_path / "cache"), SMALL).folder))
        for _ in range(3)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert len(made) == 3 and len(set(made)) == 1 and builds == [1]


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "train-000000.tar", "val-000000.tar", "meta.json"])
@pytest.mark.parametrize("damage", ["empty", "gone", "flipped"])
def test_a_damaged_cache_is_built_again(name: str, damage: str, folder: Path, tmp_path: Path):
    """A power cut, for one, left files of no bytes under the final name."""
    settings = BYTES if name == "tokenizer.json" else SMALL
    made = prepare(str(folder), str(tmp_path / "cache"), settings)
    good, path = contents(made.folder), made.folder / name
    if damage == "flipped" and name.endswith(".tar"):
        pytest.skip("the index of the shard tells")
    if damage == "gone":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(b"" if damage == "empty" else bytes([content[0] ^ 1]) + content[1:])
    prepare(str(folder), str(tmp_path / "cache"), settings)
    assert contents(made.folder) == good


@each_tokenizer
def test_a_long_line_without_spaces_takes_no_time(settings: Settings, tmp_path: Path):
    """To learn from words takes their length squared: 13 s of 200,000 characters."""
    text = write(tmp_path / "text", {f"{i}.txt": "ACGT" * 40_000 + " one two" for i in range(2)})
    began = time.process_time()
    prepare(str(text), str(tmp_path / "cache"), settings)
    assert time.process_time() - began < 5


def test_all_is_on_the_disk_before_it_has_its_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else a power cut may leave empty files under that name. The name itself comes last."""
    synced: list[Path] = []
    monkeypatch.setattr("recipes.cache.sync", lambda path: synced.append(path) if path.exists() else None)
    made = prepare(str(folder), str(tmp_path / "cache"), SMALL)
    *files, partial, cache = synced
    assert sorted(path.name for path in files) == sorted(path.name for path in made.folder.iterdir())
    assert {path.parent for path in files} == {partial} and partial.name == f"{made.folder.name}.partial"
    assert cache == made.folder.parent


def test_an_interrupted_build_leaves_nothing_to_be_taken_for_whole(folder: Path, tmp_path: Path):
    cache = str(tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *a, **k: None)
        patch.setattr(corpus, "_write", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepare(str(folder), cache, SMALL)
    (partial,) = Path(cache).glob("*.partial")
    (partial / "train-000000.tar").write_bytes(b"half")
    made = prepare(str(folder), cache, SMALL)
    assert contents(made.folder) == contents(prepare(str(folder), str(tmp_path / "other"), SMALL).folder)
    assert not partial.exists()


@pytest.mark.parametrize(("before", "after"), [([CLS], [SEP]), ([], [])])
@given(st.lists(st.lists(st.integers(5, 99), max_size=40), max_size=6), st.integers(3, 12))
def test_pack_loses_nothing_and_pads_nothing(before: list[int], after: list[int], arrays: list[list[int]], length: int):
    rows = list(pack([np.array(a, np.int64) for a in arrays], length, before, after))
    flat, width = [i for a in arrays for i in a], length - len(before) - len(after)
    assert all((len(row), row.dtype) == (length, np.dtype(np.int64)) for row in rows)
    bodies = [row.tolist()[len(before) : length - len(after)] for row in rows]
    assert [[*before, *body, *after] for body in bodies] == [row.tolist() for row in rows]
    body = [i for own in bodies for i in own]
    assert len(rows) == -(-len(flat) // width) and body == [flat[i % len(flat)] for i in range(len(body))]
