"""Claims beside made-up turns: the ratio is that of each round, and rounds that lack a way do not count."""

import pytest
from support.quick import one_of

from scripts.bench.guides.rows import ROWS, faster, fewer_bytes, less_memory, waiting
from scripts.bench.guides.ways import WAYS, config_of


def turn(seconds: float, sent: float = 1.0, kept: float = 1.0, whole: float = 1.0) -> dict[str, float]:
    return {"seconds": seconds, "sent": sent, "kept": kept, "whole": whole}


# The machine is half as fast in the second round. In the third DDP alone is slow.
ROUNDS = [
    {"DDP": turn(1.5, 80.0), "fp16": turn(1.0, 8.0), "one rank": turn(0.9)},
    {"DDP": turn(3.0, 80.0), "fp16": turn(2.0, 8.0), "one rank": turn(1.8)},
    {"DDP": turn(9.0, 80.0), "fp16": turn(1.0, 8.0), "one rank": turn(0.9)},
]


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert faster("fp16", "DDP")(ROUNDS) == "1.50 (1.50 to 9.00)"
    assert faster("DDP", "one rank", 2.0)(ROUNDS[:2]) == "1.20 (1.20 to 1.20)"
    assert fewer_bytes("fp16", "DDP")(ROUNDS) == "1.50 (1.50 to 9.00), with 1/10.0 of the bytes"


def test_the_share_of_a_step_that_waits() -> None:
    assert waiting("DDP")(ROUNDS) == "40.00 % (40.00 to 90.00)"


def test_memory_is_told_by_what_is_saved() -> None:
    rounds = [{"plain": turn(2.0, kept=100.0, whole=200.0), "full": turn(3.0, kept=10.0, whole=110.0)}]
    told = "90 % of activations, 45 % with weights and AdamW; a pass takes 1.50 (1.50 to 1.50) times as long"
    assert less_memory("full", "plain")(rounds) == told


def test_a_row_takes_the_rounds_that_have_its_ways() -> None:
    row = ROWS["compression"]
    other = [{"fp16": turn(1.0)}, {"overlap": turn(1.0), "DDP": turn(1.0)}]
    assert row.complete([*ROUNDS, *other]) == ROUNDS
    assert row.measured(other) == "not measured yet"
    assert row.measured([*other, *ROUNDS]) == "1.50 (1.50 to 9.00)"


def test_a_row_without_a_way_says_why() -> None:
    for name in ("DataParallel", "nccl=ethernet", "nccl=infiniband", "nccl=sharp"):
        assert ROWS[name].measured(ROUNDS).startswith("not measured: ")
        assert ROWS[name].lacks and not ROWS[name].ways


@pytest.mark.parametrize("name", one_of(4, {row.config(): name for name, row in ROWS.items()}.values()))
def test_the_config_of_a_row_composes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # as `compose` sets it
    row = ROWS[name]
    config = config_of(row.config())
    typed = [word.partition("=") for word in row.config() if not word.startswith("+")]
    for key, _, value in typed:
        node = config
        for part in key.split("."):
            node = node[part]
        assert node == config["nccl"] or str(node).lower() == value  # a group is its values
    assert all(word.strip("[]") in config["callbacks"] for word in callbacks(row.config()))
    assert not {"progress", "tensorboard"} & config["callbacks"].keys()


def callbacks(words: tuple[str, ...]) -> list[str]:
    return [name for word in words if word.startswith("+callbacks=") for name in word[12:-1].split(",")]


def test_all_ways_are_compared() -> None:
    assert WAYS.keys() == {way for row in ROWS.values() for way in row.ways}
