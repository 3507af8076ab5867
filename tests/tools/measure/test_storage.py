"""A disk and shards are measured, and nothing stays in the folder."""

from pathlib import Path

import pytest
from support import shards as written

from trainer.errors import DataError
from trainer.tools.measure import storage


def test_a_disk_is_written_and_read(tmp_path: Path) -> None:
    rates = storage.disk(tmp_path, 1 << 20)
    assert rates.keys() == {"write_bytes_per_s", "read_bytes_per_s"} and all(rate > 0 for rate in rates.values())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        storage.disk(tmp_path / "none", 1 << 20)
    assert str(caught.value.filename).startswith(str(tmp_path / "none"))


def test_shards_are_made_read_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SAMPLES", 8)
    rates = storage.shards(tmp_path, [])
    assert rates["bytes_per_s"] > storage.SAMPLE_BYTES * rates["samples_per_s"] > 0
    assert not list(tmp_path.iterdir())


def test_given_shards_are_read_whole(tmp_path: Path) -> None:
    paths = written.write(tmp_path / "data")
    rates = storage.shards(tmp_path, [str(tmp_path / "data" / "s-*.tar")])
    size = sum(path.stat().st_size for path in paths)
    count = written.SHARDS * written.EACH
    assert rates["bytes_per_s"] / rates["samples_per_s"] == pytest.approx(size / count, rel=0.05)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad-000000.tar").write_bytes(b"no tar")
    with pytest.raises(DataError, match=r"bad-000000\.tar"):
        storage.shards(tmp_path, [str(tmp_path / "bad-*.tar")])
