"""A server of shards, behind a network whose faults a test sets."""

from collections.abc import Iterator

import pytest
from support.http import Proxy, served
from support.shards import write


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("web")
    with served(folder) as proxy:
        write(folder / "www")
        yield proxy


@pytest.fixture
def proxy(web: Proxy) -> Proxy:
    web.well()
    return web
