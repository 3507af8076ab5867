"""A finding is one line: what, value, consequence, way out."""

import threading
from collections.abc import Iterator

import pytest

from trainer.tools.doctor.finding import Finding, in_time, size


def test_a_line_has_the_parts_that_there_are():
    assert Finding("disk", "3 MiB free").line() == "disk: 3 MiB free"
    full = Finding("disk", "3 MiB free", "warning", "checkpoints may not fit", "make room", data=3 << 20)
    assert full.line() == "disk: 3 MiB free; checkpoints may not fit; make room"


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 << 30, "80 GiB"), (3 << 40, "3 TiB")]
)
def test_bytes_in_words(number, words):
    assert size(number) == words


def test_what_never_answers_is_a_finding_after_those_that_came():
    answer, late, first = threading.Event(), Finding("gpu", "no answer"), Finding("driver", "580")

    def findings() -> Iterator[Finding]:
        yield first
        answer.wait()

    assert list(in_time(0.2, late, findings())) == [first, late]
    assert list(in_time(20.0, late, [first])) == [first]
    answer.set()


def test_what_fails_is_a_finding_after_those_that_came():
    late, first = Finding("gpu", "no answer"), Finding("driver", "580")

    def findings() -> Iterator[Finding]:
        yield first
        raise ZeroDivisionError("of the driver")

    failed = Finding("gpu", "can't be examined: ZeroDivisionError('of the driver')", "warning")
    assert list(in_time(20.0, late, findings())) == [first, failed]
