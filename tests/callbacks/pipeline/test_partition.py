"""Cuts by time, by memory and by both, against all that there are; micro-batches in flight against torch's."""

import math
from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from trainer.callbacks.pipeline.balance import balance
from trainer.callbacks.pipeline.partition import Sizes, StageMemory, cut_by_time, max_in_flight
from trainer.callbacks.pipeline.profile_blocks import Trial


def anything(stage: int, start: int, stop: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("seconds", "starts"),
    [
        ((1.0, 1.0), (0, 3)),
        ((1.0, 1.05), (0, 3)),  # alike: noise moves no block
        ((1.0, 2.0), (0, 4)),  # half as fast: half as many
        ((3.0, 1.0), (0, 1)),
    ],
)
def test_a_slow_rank_gets_fewer_blocks(seconds: tuple[float, ...], starts: tuple[int, ...]):
    trials = [Trial(0.0, [each] * 6, 0.0, 0.0, [], 0) for each in seconds]
    assert cut_by_time(trials, [[0], [1]], anything) == starts
    assert cut_by_time([*trials, *trials], [[0, 2], [1, 3]], anything) == starts


def test_the_ends_and_the_slowest_replica_count():
    assert cut_by_time([Trial(3.0, [1.0] * 6, 0.0, 0.0, [], 0)] * 2, [[0], [1]], anything) == (0, 1)
    assert cut_by_time([Trial(0.0, [1.0] * 6, 3.0, 0.0, [], 0)] * 2, [[0], [1]], anything) == (0, 4)
    fast, slow = Trial(0.0, [1.0] * 6, 0.0, 0.0, [], 0), Trial(0.0, [2.0] * 6, 0.0, 0.0, [], 0)
    assert cut_by_time([fast, fast, fast, slow], [[0, 1], [2, 3]], anything) == (0, 4)


SIZES = Sizes([4.0, 1, 1, 1, 1, 1, 1, 3], [2.0, 5, 5, 5, 5, 5, 5, 1], stream=1)


def every_cut(stages: int) -> list[tuple[int, ...]]:
    return [(0, *cut) for cut in combinations(range(1, 6), stages - 1)]


def needs(starts: Sequence[int], in_flight: Sequence[int], micros: int) -> list[float]:
    """The same numbers as `StageMemory.need`, from the definition."""
    found: list[float] = []
    for stage, (start, stop) in enumerate(zip(starts, (*starts[1:], 6), strict=True)):
        parts = [*([0] if stage == 0 else []), *range(start + 1, stop + 1), *([7] if stage == len(starts) - 1 else [])]
        messages = micros * ((stage > 0) + (stage < len(starts) - 1))
        found.append(sum(SIZES.fixed[i] + in_flight[stage] * SIZES.saved[i] for i in parts) + messages)
    return found


@pytest.mark.parametrize("limits", [[30.0, 40, 40], [70.0, 25, 20], [1e9, 14, 1e9], [50.0, 20, 20], [math.inf] * 3])
def test_of_the_cuts_that_fit_the_fastest_is_taken(limits: list[float]):
    times, in_flight, micros = [1.0, 2, 3, 3, 2, 1], [3, 2, 1], 4
    memory = StageMemory(SIZES, limits, in_flight, micros)

    def worst(starts: Sequence[int]) -> float:
        return max(sum(times[a:b]) for a, b in zip(starts, (*starts[1:], 6), strict=True))

    fitting = [
        starts for starts in every_cut(3)
        if all(need <= limit for need, limit in zip(needs(starts, in_flight, micros), limits, strict=True))
    ]  # fmt: skip
    found = balance(times, [1.0] * 3, 0.0, 0.0, memory.fits)
    assert (found is None) == (not fitting)
    if found:
        assert found in fitting and worst(found) == min(map(worst, fitting))
        assert memory.holds(found, [0, 1, 2])
    else:
        stage, need = memory.tightest()
        share = min(
            max(n / limit for n, limit in zip(needs(s, in_flight, micros), limits, strict=True)) for s in every_cut(3)
        )
        assert sum(need) / limits[stage] == pytest.approx(share) and share > 1


def test_two_stages_of_a_rank_share_its_memory():
    memory = StageMemory(SIZES, [30.0] * 4, [1] * 4, 1)
    starts = (0, 1, 3, 5)
    assert all(memory.fits(s, a, b) for s, a, b in zip(range(4), starts, (*starts[1:], 6), strict=True))
    pairs = needs(starts, [1] * 4, 1)
    for ranks in ([0, 1, 0, 1], [0, 1, 1, 0]):
        sums = [sum(need for need, rank in zip(pairs, ranks, strict=True) if rank == own) for own in (0, 1)]
        for limit in (max(sums), max(sums) - 0.5):
            assert StageMemory(SIZES, [limit] * 4, [1] * 4, 1).holds(starts, ranks) == (max(sums) <= limit)
    assert memory.halved().limits == [15.0] * 4 and not memory.halved().fits(0, 0, 3)


@pytest.mark.parametrize(("name", "kind"), [
    ("interleaved", "ScheduleInterleaved1F1B"), ("zero_bubble", "ScheduleInterleavedZeroBubble"),
    ("zbv", "ScheduleZBVZeroBubble"),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_micro_batches_in_flight_are_those_of_torchs_schedules(name: str, kind: str, ranks: int):
    """Exact but for `interleaved`, of which there is a bound that the stages with most reach."""
    for micros in (1, 2, ranks, 2 * ranks - 1, 4 * ranks):
        expected = peaks(getattr(schedules, kind), ranks, micros)
        found = max_in_flight(name, 2 * ranks, ranks, micros, 1)
        assert all(one >= other for one, other in zip(found, expected, strict=True))
        assert max(found) == max(expected)
        assert name == "interleaved" or found == expected
    assert max_in_flight("gpipe", 3, 3, 7, 1) == [7] * 3 and max_in_flight("1f1b", 3, 3, 7, 1) == [3, 2, 1]
    assert max_in_flight("pipedream_2bw", 3, 3, 4, 2) == [5, 3, 1]


def peaks(kind: Any, ranks: int, micros: int) -> list[int]:
    """What the order of a schedule's passes keeps of each stage, at most."""
    rounds = max(1, micros // ranks)
    me = SimpleNamespace(
        n_local_stages=2, microbatches_per_round=micros // rounds, pp_group_size=ranks, _n_microbatches=micros,
        num_stages=2 * ranks,
    )  # fmt: skip
    in_flight, most = [0] * 2 * ranks, [0] * 2 * ranks
    for rank in range(ranks):
        for action in kind._calculate_single_rank_operations(me, rank):
            if action is not None and action.microbatch_index is not None and action.microbatch_index < micros:
                in_flight[action.stage_index] += {"F": 1, "W": -1, "B": -1}.get(action.computation_type.value, 0)
                most[action.stage_index] = max(most[action.stage_index], in_flight[action.stage_index])
    return most
