"""What tests of shards that come from elsewhere share."""

from pathlib import Path

import pytest

import trainer.data.remote.download as fetch_module
import trainer.data.remote.shard as remote_module


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(fetch_module, "PAUSES_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(remote_module, "FIRST_S", 0.2)
