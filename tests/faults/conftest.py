"""What these tests share: a run in which nothing fails, and a table of how long it took to recover from what."""

from pathlib import Path
from typing import Any

import pytest
from command import run
from troubled import RECOVERED, RUN


@pytest.fixture(autouse=True)
def _looked_at(looked_at: None) -> None:
    """All runs here are."""


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    assert run(RUN, folder).code == 0
    return folder


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if RECOVERED:
        terminalreporter.section("seconds from a fault to the next step")
        for test, seconds in RECOVERED:
            terminalreporter.write_line(f"{seconds:6.1f}  {test}")
