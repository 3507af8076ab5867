"""Lines of a stranger's, a torn or a running file: each whole object is read, and one line says what is not."""

import math

import pytest

from trainer.tools.report.lines import Lines, number, parse, read_object


def read(tmp_path, content: bytes) -> tuple[list[int], str]:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content)
    lines = Lines(file)
    return [line["step"] for line in lines], lines.note


@pytest.mark.parametrize(
    "content, steps, note",
    [
        (b'{"step": 1}\n{"step": 2}\n', [1, 2], ""),
        (b'{"step": 1}\n{"step": 2}', [1, 2], ""),
        (b'{"step": 1}\n\n{"step": 2, "tr', [1], "metrics.jsonl: its last line is torn, and left out"),
        (b'{"step": 1\n{"step": 2}\n[3]\n', [2], "metrics.jsonl: 2 line(s) are damaged, and left out"),
        (b"\x00\xff\n", [], "metrics.jsonl: 1 line(s) are damaged, and left out"),
        (b"", [], "metrics.jsonl: has no line yet"),
    ],
)
def test_what_can_be_read(tmp_path, content, steps, note):
    assert read(tmp_path, content) == (steps, note)


def test_a_file_that_is_missing_or_no_file(tmp_path):
    for path, note in ((tmp_path / "none", "none: is missing"), (tmp_path, f"{tmp_path.name}: can't be read")):
        lines = Lines(path)
        assert list(lines) == [] and lines.note.startswith(note)


@pytest.mark.parametrize(
    "line", [b'{"step": true}', b'{"step": 1.5}', b'{"step": -1}', b'{"step": 1e400}', b"{}", b"[" * 100_000, b"7"]
)
def test_no_line(line):
    assert parse(line) is None


def test_numbers():
    assert number(3) == 3.0 and number(0.5) == 0.5
    assert all(math.isnan(number(value)) for value in (None, "1", True, [], {}, 10**400))


def test_an_object_of_a_file(tmp_path):
    file = tmp_path / "summary.json"
    assert read_object(file) == ({}, "summary.json: is missing")
    for content, found in (("{", "no JSON"), ("[1]", "no object")):
        file.write_text(content)
        assert read_object(file) == ({}, f"summary.json: can't be read ({found})")
    file.write_text('{"a": 1}')
    assert read_object(file) == ({"a": 1}, "")
