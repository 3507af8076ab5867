"""Chooses the cases of a test that each run of the tests has. The others are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Return the cases for `parametrize`: all but the first `count` are slow."""
    params = [pytest.param(*case) if isinstance(case, tuple) else pytest.param(case) for case in cases]
    return params[:count] + [pytest.param(*param.values, marks=pytest.mark.slow) for param in params[count:]]
