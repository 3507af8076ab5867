"""A pipeline against data parallelism: both train a tiny model, and the table says what was measured."""

from pathlib import Path

import pytest
from support.ranks import run_ranks

from scripts.bench import stages as bench
from trainer.process.environment import Place


def tiny(place: Place) -> list[float]:
    places = [Place(**{**vars(place), "store": f"{place.store}-{name}"}) for name in bench.RUNS]
    return [bench.train(each, name) for each, name in zip(places, bench.RUNS, strict=True)]


@pytest.mark.slow
def test_both_ways_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(min(seconds) > 0 for seconds in run_ranks(2, tiny))


def test_what_the_table_says() -> None:
    rounds = [{"ddp": 1.0, "1f1b": 0.5}, {"ddp": 4.0, "1f1b": 1.0}, {"ddp": 2.0, "1f1b": 4.0}]
    (row,) = bench.table({"slow": rounds})
    assert row["link"] == "slow" and row["ddp, ms a step"] == 2000.0 and row["1f1b, ms a step"] == 1000.0
    assert (row["1f1b to ddp"], row["least"], row["most"]) == (0.5, 0.25, 2.0)
