"""What these tests share: a run in which nothing fails."""

from pathlib import Path

import pytest
from command import run
from troubled import RUN


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    assert run(RUN, folder).code == 0
    return folder
