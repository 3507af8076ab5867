"""Chooses the cases of a test that each run of the tests has. The others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Return the cases for `parametrize`: all but the first `count` are slow."""
    values = [case if type(case) is tuple else (case,) for case in cases]
    slow = [pytest.param(*each, marks=pytest.mark.slow) for each in values[count:]]
    return [pytest.param(*each) for each in values[:count]] + slow


def one_of(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases for `parametrize`: of each `count` cases in a row, all but the first are slow."""
    listed = list(cases)
    others = [case for number, case in enumerate(listed) if number % count]
    return quick([*listed[::count], *others], len(listed[::count]))


def selected(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Return the values of a parameter in the tests of this file that this run has."""
    items = [item for item in request.session.items if item.path == request.path]
    return {
        item.callspec.params[name] for item in items if name in getattr(getattr(item, "callspec", None), "params", ())
    }
