"""Criteo's format against a reader of single fields; one line for each mistake; parts, order, cache, Parquet."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from support.messages import refuses

from recipes import criteo
from recipes.criteo import CATEGORIES, FIELDS, INTEGERS, NAMES, Clicks, files, of_json, parse, prepare
from trainer.errors import DataError

PARTS = ["1", "-5", "", *map(str, range(11)), "68fd1e64", "", "FFFFFFFF", "0", *["a"] * 22]
LINE = "\t".join(PARTS) + "\n"


def read(line: str) -> list[int]:
    """Reads a line field by field."""
    label, *rest = line.rstrip("\n").split("\t")
    assert len(rest) == INTEGERS + CATEGORIES
    return [int(label), *(int(x or 0) for x in rest[:INTEGERS]), *(int(x or "0", 16) for x in rest[INTEGERS:])]


def numbers(rows: np.ndarray) -> list[list[int]]:
    return np.concatenate(
        [rows[:, : 1 + INTEGERS].astype(np.int64), rows[:, 1 + INTEGERS :].view(np.uint32).astype(np.int64)], 1
    ).tolist()


def lines(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        dense = [
            str(x) if keep else "" for x, keep in zip(rng.integers(-3, 10**6, INTEGERS), rng.random(INTEGERS) < 0.8)
        ]
        kinds = [
            f"{x:08x}" if keep else "" for x, keep in zip(rng.integers(1 << 32, size=CATEGORIES), rng.random(26) < 0.9)
        ]
        made.append("\t".join([str(int(rng.random() < 0.3)), *dense, *kinds]) + "\n")
    return made


ROWS = some.tuples(
    some.integers(0, 1).map(str),
    some.lists(some.one_of(some.just(""), some.integers(-(1 << 31), (1 << 31) - 1).map(str)), min_size=13, max_size=13),
    some.lists(
        some.one_of(some.just(""), some.integers(0, (1 << 32) - 1).map(lambda x: f"{x:x}")), min_size=26, max_size=26
    ),
)


@given(some.lists(ROWS, max_size=4))
def test_rows_are_those_of_a_plain_reader(rows: list[tuple[str, list[str], list[str]]]) -> None:
    own = ["\t".join([label, *dense, *kinds]) + "\n" for label, dense, kinds in rows]
    assert numbers(parse("".join(own).encode(), "x")) == [read(line) for line in own]


def test_upper_case_negative_numbers_and_ends_of_lines_of_windows() -> None:
    assert numbers(parse((LINE + LINE).replace("\n", "\r\n").encode(), "x")) == [read(LINE)] * 2


@pytest.mark.parametrize(
    ("field", "wrong", "told"),
    [
        (0, "", "field 1: '' is not 0 or 1"),
        (0, "2", "field 1: '2' is not 0 or 1"),
        (0, "01", "field 1: '01' is not 0 or 1"),
        (1, "1.5", "field 2: '1.5' is not an integer of 32 bits"),
        (2, "-", "field 3: '-' is not an integer of 32 bits"),
        (2, "--1", "field 3: '--1' is not"),
        (3, "2147483648", "field 4: '2147483648' is not"),
        (13, "f", "field 14: 'f' is not an integer of 32 bits"),
        (14, "0x1", "field 15: '0x1' is not a hexadecimal number of 8 digits at most"),
        (15, "123456789", "field 16: '123456789' is not"),
        (39, "-1", "field 40: '-1' is not"),
        (39, "a\x1b[2J", "field 40: 'a?[2J' is not"),
        (39, "a\tb", "has 41 fields, not 40; correct or remove it"),
        (38, "", ""),
    ],
)
def test_a_mistake_names_file_line_and_field(field: int, wrong: str, told: str) -> None:
    text = LINE + "\t".join([*PARTS[:field], wrong, *PARTS[field + 1 :]]) + "\n" + LINE
    if not told:
        assert len(parse(text.encode(), "x")) == 3
        return
    with pytest.raises(DataError) as error:
        parse(text.encode(), "day_3", 10)
    assert str(error.value).startswith("day_3: line 12") and told in str(error.value)


@pytest.mark.parametrize("text", ["\n", LINE + "\n", "1\t2\n", "no clicks\n"])
def test_lines_that_are_none(text: str) -> None:
    with pytest.raises(DataError, match=rf"^x: line \d has \d fields, not {FIELDS}; correct or remove it$"):
        parse(text.encode(), "x")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, end: str) -> None:
    monkeypatch.setattr(criteo, "BLOCK", 1000)
    own = lines(60)
    text = "".join(own).removesuffix("\n").encode() + end.encode()
    (tmp_path / "day_0").write_bytes(gzip.compress(text) if packed else text)
    clicks = Clicks([prepare(tmp_path / "day_0", str(tmp_path / "cache"))])
    assert numbers(np.stack([clicks[i] for i in range(len(clicks))])) == [read(line) for line in own]


def test_a_mistake_in_a_later_block_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "BLOCK", 1000)
    path, cache = tmp_path / "day_0", tmp_path / "cache"
    path.write_text("".join([*lines(33), "x" + LINE, *lines(5)]))
    with pytest.raises(DataError, match=r"day_0: line 34, field 1: 'x1' is not 0 or 1; correct or remove the line$"):
        prepare(path, str(cache))
    assert not list(cache.rglob("*.bin"))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "has no row; give a file in Criteo's format"),
        (gzip.compress(LINE.encode())[:-9], "can't be unpacked"),
        (gzip.compress(LINE.encode())[:10] + b"\xff" * 20, "can't be unpacked"),
    ],
    ids=["empty", "cut", "damaged"],
)
def test_an_empty_or_a_damaged_file(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "day_0").write_bytes(data)
    with pytest.raises(DataError, match=told):
        prepare(tmp_path / "day_0", str(tmp_path / "cache"))
    assert [path.suffix for path in (tmp_path / "cache" / "criteo").iterdir()] == [".lock"]


def test_a_file_is_read_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "day_0", str(tmp_path / "cache")
    path.write_text(LINE)
    made = prepare(path, cache)
    with monkeypatch.context() as patch:
        patch.setattr(criteo, "parse", None)
        assert prepare(path, cache) == made
    path.write_text(LINE * 2)
    assert len(Clicks([prepare(path, cache)])) == 2
    with refuses("recipe.cache", "writable"):
        prepare(path, str(path))


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("recipes.cache.sync", lambda path: synced.append(path) if path.exists() else None)
    (tmp_path / "day_0").write_text(LINE)
    made = prepare(tmp_path / "day_0", str(tmp_path / "cache"))
    assert synced == [made.with_suffix(".partial"), made.parent]


def test_parts_of_several_files_are_in_order_and_apart(tmp_path: Path) -> None:
    own = lines(100)
    for day, (start, stop) in enumerate([(0, 30), (30, 31), (31, 100)]):
        (tmp_path / f"day_{day}").write_text("".join(own[start:stop]))
    made = [prepare(path, str(tmp_path / "cache")) for path in files(str(tmp_path / "day_*"), "recipe.train")]
    found = []
    for part in ((0.0, 0.3), (0.3, 0.905), (0.905, 1.0)):
        clicks = Clicks(made, part)
        found += [clicks[i] for i in range(len(clicks))]
        assert clicks.positives() == sum(int(clicks[i][0]) for i in range(len(clicks)))
    assert numbers(np.stack(found)) == [read(line) for line in own]
    assert len({Clicks(made, part).fingerprint for part in ((0.0, 0.5), (0.5, 1.0))}) == 2


def test_days_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("day_10", "day_2", "day_0", ".hidden"):
        (tmp_path / name).write_text(LINE)
    for source in (str(tmp_path), str(tmp_path / "day_*")):
        assert [path.name for path in files(source, "recipe.train")] == ["day_0", "day_2", "day_10"]
    assert [path.name for path in files([f"{tmp_path}/day_2", f"{tmp_path}/day_0"], "x")] == ["day_2", "day_0"]
    with refuses("recipe.val", "file"):
        files(f"{tmp_path}/none", "recipe.val")


def values(line: str) -> dict[str, int | str | None]:
    label, *rest = line.rstrip("\n").split("\t")
    return dict(zip(NAMES, [int(label), *(int(x) if x else None for x in rest[:13]), *(x or None for x in rest[13:])]))


def test_parquet_has_the_rows_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(criteo, "BLOCK", 1000)
    own = lines(50)
    parquet.write_table(arrow.Table.from_pylist([values(line) for line in own]), tmp_path / "clicks.parquet")
    clicks = Clicks([prepare(tmp_path / "clicks.parquet", str(tmp_path / "cache"))])
    assert numbers(np.stack([clicks[i] for i in range(len(clicks))])) == [read(line) for line in own]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"label": None}, "label=None is not 0 or 1"),
        ({"label": 2}, "label=2 is not 0 or 1"),
        ({"I1": 1.5}, "I1=1.5 is not an integer of 32 bits"),
        ({"I2": float("nan")}, "I2=nan is not"),
        ({"C1": "xyz"}, "C1=xyz is not a hexadecimal number of 8 digits at most"),
        ({"C2": 1 << 32}, "C2=4294967296 is not"),
        ({"C3": "-1"}, "C3=-1 is not"),
    ],
)
def test_a_wrong_value_of_json_is_named(wrong: dict[str, object], told: str) -> None:
    assert of_json(values(LINE), "x").tolist() == parse(LINE.encode(), "x")[0].tolist()
    with pytest.raises(DataError) as error:
        of_json({**values(LINE), **wrong}, "shard 7")
    assert str(error.value) == f"shard 7: {told}" + str(error.value).partition(told)[2] and told in str(error.value)


def test_json_without_a_column() -> None:
    for wrong in ({}, None, [1]):
        with pytest.raises(DataError, match=r"^x: has no label; give label, I1 to I13, and C1 to C26$"):
            of_json(wrong, "x")
