"""What tests of shards that come from elsewhere share."""

from pathlib import Path

import pytest

from trainer import timeouts


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(timeouts, "SERVER_PAUSES_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(timeouts, "FIRST_DOWNLOAD_S", 0.2)
