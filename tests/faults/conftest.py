"""What these tests share: a run in which nothing fails, and how long it took to recover from what."""

from collections.abc import Generator
from pathlib import Path

import pytest
from support.cli import run
from support.faults import RECOVERED, RUN


@pytest.fixture(autouse=True)
def _looked_at(looked_at: None) -> None:
    """All runs here are."""


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    assert run(RUN, folder).code == 0
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    RECOVERED.clear()
    yield
    item.user_properties.append(("recovered", RECOVERED.copy()))
