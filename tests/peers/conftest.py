"""What these tests share: each peer, and a run of it in which nothing fails."""

import shutil
from pathlib import Path

import pytest
from support.peers import NAMES, launch, off, steps

NEEDS = {"lightning": ("lightning", "torchdata"), "accelerate": ("accelerate",), "dcp": ("torchdata",)}


@pytest.fixture(params=list(NAMES), scope="session")
def peer(request) -> str:
    for module in NEEDS[request.param]:
        pytest.importorskip(module, reason=f"{request.param} needs {module}: the extra [peers]")
    return request.param


@pytest.fixture(scope="session")
def golden(peer: str, tmp_path_factory) -> Path:
    """Twice the same bits."""
    folder, again = (tmp_path_factory.mktemp(f"{peer}-{name}") for name in ("golden", "again"))
    for cwd in (folder, again):
        result = launch(peer, cwd)
        assert result.code == 0, result.err
        assert steps(cwd) == [list(range(1, 13))]
    assert off(again, folder) == 0.0
    shutil.rmtree(again)
    return folder
