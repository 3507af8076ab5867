"""Each loader gives every image once, and a table has the goals."""

import sys
from pathlib import Path

import pytest

from scripts.bench import images as bench
from scripts.bench.harness import Rounds
from trainer.errors import ConfigError


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DISTINCT", 2)


def test_every_loader_gives_an_epoch(tmp_path: Path) -> None:
    photos = bench.Photos(tmp_path, 40, 30, 48)
    photos.write()
    assert len(photos.files) == 48 and len(photos.shards) == 8
    for name in bench.LOADERS:
        seen = 0.0
        for images in bench.LOADERS[name](photos):
            seen += images
            if seen >= 48:
                break
        assert seen == 48, name


def test_a_turn_is_a_rate(tmp_path: Path) -> None:
    photos = bench.Photos(tmp_path, 40, 30, 48)
    photos.write()
    assert all(bench.turn(photos, name)["rate"] > 0 for name in ("Echelon", "Pillow"))


def test_what_a_table_says(tmp_path: Path) -> None:
    """Rounds are compared with each other."""
    turns = {
        "Echelon": [150.0, 300.0],
        "Pillow": [100.0, 200.0],
        "decode alone": [200.0, 400.0],
        "DALI": [125.0, 250.0],
    }
    found = Rounds({name: [{"rate": each} for each in rates] for name, rates in turns.items()})
    rows, goals = bench.table(bench.Photos(tmp_path, 40, 30, 48), found)
    assert [row["of Pillow"] for row in rows] == [1.5, 1, 2, 1.25]
    assert [(goal.name, goal.value, goal.met) for goal in goals] == [
        ("40 x 30: times Pillow", 1.5, True),
        ("40 x 30: times DALI", 1.2, True),
    ]


def test_an_unknown_loader_is_reported_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["images", "--loaders", "Pilow"])
    with pytest.raises(ConfigError, match=r"^--loaders Pilow: no such loader is installed; did you mean Pillow"):
        bench.main()
