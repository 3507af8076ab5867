"""The calls of a source file, and their rows: numbers of the past alone, sampled negatives, the same each time."""

import zlib

import pytest

from recipes.calls import DAYS, NEGATIVES, Call, calls_of, days, rows
from recipes.criteo import FIELDS, Clicks, prepare

SOURCE = b"""
import os
ignored()
class A:
    def f(self):
        a(b(1)).c()
        x[0]()
        return lambda: a()
def g():
    os.path.join(len(1))
"""


def test_calls_are_in_the_order_of_their_names() -> None:
    found = [(call.name, call.owner, call.function, call.line - call.began) for call in calls_of(SOURCE)]
    a, g = [("a", "A", "f", 1), ("b", "A", "f", 1), ("c", "A", "f", 1), ("a", "A", "f", 3)], ("", "g", 1)
    assert found == [*a, ("join", *g), ("len", *g)]


def test_a_file_with_a_mistake_has_no_calls() -> None:
    assert not calls_of(b"def f(:") and not calls_of(b"\0")


def made() -> list[list[list[str]]]:
    """Two files of 20 calls: two calls of each file a day."""
    own = {
        f"p/{file}.py": [Call(f"n{i % 3}", "", "f" if i < 10 else "g", 1, 1 + i) for i in range(20)] for file in "ab"
    }
    return [[line.rstrip("\n").split("\t") for line in lines] for lines in rows(own)]


def test_numbers_are_of_the_past() -> None:
    positives = [[row for row in lines if row[0] == "1"] for lines in made()]
    assert [len(lines) for lines in positives] == [4] * DAYS
    first, second = positives[0][:2]
    assert first[1:8] == ["0", "0", "", "0", "0", "0", "0"] and second[1:8] == ["0", "0", "", "0", "1", "1", "1"]
    last = positives[-1][-1]  # call 19 of b: n1 at 1, 4, ... 16 before, at 10, 13 and 16 in the function
    earlier = 2 * sum(i % 3 == 1 for i in range(18))
    assert last[1:8] == ["6", "3", "3", str(earlier), "19", "9", "19"]
    kinds = ["n1", "n0", "n2", "p/b.py", "p", "", "g"]
    assert last[14:21] == [f"{zlib.crc32(kind.encode()):08x}" if kind else "" for kind in kinds]


def test_negatives_are_other_names_of_the_day() -> None:
    for lines in made():
        names, positive = {row[14] for row in lines if row[0] == "1"}, ""
        for row in lines:
            assert len(row) == FIELDS
            positive = row[14] if row[0] == "1" else positive  # the row of the call comes first
            assert row[0] == "1" or (row[14] in names and row[14] != positive)
    assert made() == made()


@pytest.mark.slow
def test_the_librarys_days(tmp_path) -> None:
    """Real rows: about a quarter is positive, so few sampled names were the call's own."""
    paths = days(str(tmp_path))
    assert days(str(tmp_path)) == paths and len(paths) == DAYS
    last = Clicks([prepare(paths[-1], str(tmp_path))])
    assert len(last) > 10_000
    assert 1 / (1 + NEGATIVES) < last.positives() / len(last) < 0.26
