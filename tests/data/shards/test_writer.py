"""Written shards read back; the same samples give the same bytes; a failure leaves no cut shard."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import ROOT
from support.tars import read_all

from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError

NUMBERS = np.arange(12, dtype=np.uint16).reshape(3, 4)


def samples() -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"f/{i:03d}",
            "ids.npy": NUMBERS + i,
            "cls": i,
            "int": -i,
            "json": {"i": i},
            "txt": "\u00e4" * i,
            "bin": b"\0",
        }
        | {"safetensors": {"x": NUMBERS}, "png": np.full((2, 3, 3), i, np.uint8)}
        for i in range(10)
    ]


def test_written_shards_read_back(tmp_path: Path) -> None:
    paths = write_shards(iter(samples()), tmp_path / "new/folder", "train", per_shard=4)
    assert [path.name for path in paths] == [f"train-00000{i}.tar" for i in range(3)]
    assert sorted(tmp_path.glob("new/folder/*")) == paths
    reader = ShardReader(Index.open(paths))
    assert reader.index.counts == [4, 4, 2]
    for expected, sample in zip(samples(), read_all(reader), strict=True):
        assert sample.keys() == expected.keys()
        for name in ("__key__", "cls", "int", "json", "txt", "bin"):
            assert sample[name] == expected[name]
        assert np.array_equal(sample["ids.npy"], expected["ids.npy"])
        assert np.array_equal(sample["safetensors"]["x"], NUMBERS)
        assert np.array_equal(np.asarray(sample["png"]), expected["png"])


def test_the_same_samples_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_shards(samples(), tmp_path / "1", "train", per_shard=4)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000)
    second = write_shards(samples(), tmp_path / "2", "train", per_shard=4)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize(("per_shard", "why"), [(0, "must be at least 1"), ("4", "must be int, not str")])
def test_a_shard_has_samples(per_shard, why, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^per_shard={per_shard}: {why}$"):
        write_shards(samples(), tmp_path, "train", per_shard)
    assert not list(tmp_path.iterdir())


def test_shards_are_not_mixed_with_older_ones(tmp_path: Path) -> None:
    write_shards(samples(), tmp_path, "train", per_shard=4)
    with pytest.raises(DataError, match=r"train-00000\d\.tar: exists already"):
        write_shards(samples()[:1], tmp_path, "train", per_shard=4)
    assert len(write_shards(samples(), tmp_path, "val", per_shard=5)) == 2
    assert write_shards([], tmp_path, "none", per_shard=5) == []


def test_a_failure_leaves_no_cut_shard(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"000002\.tar: 'last'\.unknown: no encoder for object; give bytes"):
        write_shards([*samples(), {"__key__": "last", "unknown": object()}], tmp_path, "train", per_shard=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train-000000.tar",
        "train-000001.tar",
        "train.incomplete",
    ]


def test_shards_whose_writer_was_killed_are_refused_until_all_are_written(tmp_path: Path) -> None:
    """Each shard is whole, so a run on the pattern would train on a part of the samples."""
    writes = f"""
import os, pathlib
from trainer.data.shards.writer import write_shards
samples = ({{"__key__": str(i), "cls": i}} for i in range(9))
write_shards(samples, pathlib.Path({str(tmp_path)!r}), "train", 4, lambda *_: os.kill(os.getpid(), 9))
"""
    killed = subprocess.run([sys.executable, "-c", writes], timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert killed.returncode == -9
    (shard,) = tmp_path.glob("train-*.tar")
    with pytest.raises(DataError, match=r"train\.incomplete: not all of these shards are written; "):
        find_shards(f"{tmp_path}/train-*.tar")
    shard.unlink()
    written = write_shards(samples(), tmp_path, "train", per_shard=4)
    assert find_shards(f"{tmp_path}/train-*.tar") == written == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("keys", [["a.b"], ["a", "a"], [""], ["__meta__/a"]])
def test_keys_that_would_not_read_back_are_refused(tmp_path: Path, keys: list[str]) -> None:
    with pytest.raises(DataError, match=f"key {keys[-1]!r}: must be unique"):
        write_shards([{"__key__": key, "cls": i} for i, key in enumerate(keys)], tmp_path, "train", per_shard=4)
