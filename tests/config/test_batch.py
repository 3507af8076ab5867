"""The split of a batch: it divides exactly, or the message offers values that do, and no nearer ones exist."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.batch import split_batch
from trainer.data.sampling.order import near_equal
from trainer.errors import ConfigError

MAYBE = st.none() | st.integers(1, 12)


def divides(batch: int, world: int, micro_batch: int | None, accumulate: int | None) -> bool:
    """By search, not by arithmetic."""
    micros = [micro_batch] if micro_batch else range(1, batch + 1)
    times = [accumulate] if accumulate else range(1, batch + 1)
    return any(world * m * a == batch for m in micros for a in times)


@given(st.integers(1, 200), st.integers(1, 9), MAYBE, MAYBE)
def test_it_divides_or_is_refused_with_what_does(batch, world, micro_batch, accumulate):
    if divides(batch, world, micro_batch, accumulate):
        micro, times = split_batch(batch, world, micro_batch, accumulate)
        assert micro * times * world == batch
        assert micro_batch in (None, micro)
        assert accumulate in (None, times)
        return
    with pytest.raises(ConfigError) as refusal:
        split_batch(batch, world, micro_batch, accumulate)
    offers = {key: [int(value) for value in re.findall(rf"\b{key}=(\d+)", str(refusal.value).split("nearest")[1])]
              for key in ("batch", "micro_batch", "accumulate")}  # fmt: skip
    check_batches(offers["batch"], batch, world, micro_batch, accumulate)
    check_others(offers, batch, world, {"micro_batch": micro_batch, "accumulate": accumulate})


def check_batches(offers: list[int], batch: int, world: int, micro_batch: int | None, accumulate: int | None) -> None:
    assert offers and all(split_batch(offer, world, micro_batch, accumulate) for offer in offers)
    nearest = min(abs(offer - batch) for offer in offers)
    assert not any(
        divides(other, world, micro_batch, accumulate) for other in range(max(1, batch - nearest + 1), batch + nearest)
    )


def check_others(offers: dict[str, list[int]], batch: int, world: int, given: dict[str, int | None]) -> None:
    """Each offer is for that key, with the other one left out."""
    for key, value in given.items():
        if value is None or batch % world:
            assert not offers[key]
            continue
        (offer,) = offers[key]
        alone = [v for v in range(1, batch + 1) if divides(batch, world, **{**dict.fromkeys(given), key: v})]
        assert offer in alone
        assert abs(offer - value) == min(abs(v - value) for v in alone)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, None, None), "batch=10: does not divide into 4 rank(s); nearest that do: batch=8, batch=12"),
        ((3, 8, None, None), "batch=3: does not divide into 8 rank(s); nearest that do: batch=8"),
        (
            (64, 4, 6, None),
            "batch=64: does not divide into 4 rank(s), micro_batch=6; nearest that do: batch=48, batch=72; "
            "or micro_batch=4",
        ),
        (
            (64, 4, 8, 4),
            "batch=64: does not divide into 4 rank(s), micro_batch=8, accumulate=4; nearest that do: batch=128; "
            "or one of micro_batch=8 or accumulate=4 alone",
        ),
        ((0, 4, None, None), "batch=0: must be at least 1"),
        ((8, 4, 0, None), "micro_batch=0: must be at least 1"),
        ((8, 4, None, -1), "accumulate=-1: must be at least 1"),
    ],
)
def test_messages(arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        split_batch(*arguments)


@given(st.integers(1, 200), st.integers(1, 9), MAYBE, MAYBE)
def test_uneven_parts_take_every_sample_and_none_is_empty(batch, world, micro_batch, accumulate):
    if batch < world:
        with pytest.raises(ConfigError, match=f"^batch={batch}: is less than a sample for each of {world} ranks; "):
            split_batch(batch, world, micro_batch, accumulate, uneven=True)
        return
    micro, times = split_batch(batch, world, micro_batch, accumulate, uneven=True)
    bounds = [near_equal(batch, rank, world) for rank in range(world)]
    sizes = [
        last - first
        for start, stop in bounds
        for first, last in (near_equal(stop - start, i, times) for i in range(times))
    ]
    assert sum(sizes) == batch and min(sizes) > 0 and max(sizes) == micro
    assert micro_batch is None or micro <= max(micro_batch, 2)  # 2 where a part has a sample and another two
    if divides(batch, world, micro_batch, accumulate):
        assert (micro, times) == split_batch(batch, world, micro_batch, accumulate)


def test_by_hand():
    assert split_batch(96, 4, None, None) == (24, 1)
    assert split_batch(96, 4, 6, None) == (6, 4)
    assert split_batch(96, 4, None, 3) == (8, 3)
    assert split_batch(96, 4, 12, 2) == (12, 2)
