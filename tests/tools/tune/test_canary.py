"""The verdict over pairs of short runs."""

import math

import pytest

from trainer.tools.tune.canary import Judge, in_phases, p_value, spread

EXACT = Judge(exact=True, random=False, bound=0.01)


def run(seconds: float, losses=(3.0, 2.0, 1.0), gib: float = 1.0, advice=(), slowdown: float = 1.0, rank=None) -> dict:
    return {
        "step_s": seconds, "score_s": seconds * slowdown, "losses": list(losses), "memory_bytes": gib * 2**30,
        "advice": [{"name": text[:4], "text": text, "rank": rank, "config": "workers=2"} for text in advice],
        "phases": {},
    }  # fmt: skip


def pairs(before: list[float], after: list[float], **more) -> list:
    return [(run(a), run(b, **more)) for a, b in zip(before, after, strict=True)]


STEADY = [1.0, 1.01, 0.99, 1.0, 1.02]


def test_a_faster_config_with_equal_losses_is_recommended() -> None:
    verdict = EXACT.judge(pairs(STEADY, [0.8] * 5))
    assert verdict.recommended and verdict.gain == pytest.approx(1.25) and not verdict.faults
    assert "in 5 of 5 pairs (sign test, p = 0.031)" in verdict.findings[0]


def test_one_lost_pair_is_enough_to_stay() -> None:
    verdict = EXACT.judge(pairs(STEADY, [0.8, 0.8, 1.1, 0.8, 0.8]))
    assert not verdict.recommended and verdict.faults == ["faster in 4 of 5 pairs, and all are needed"]


def test_a_gain_within_the_noise_is_none() -> None:
    noisy = [1.0, 1.4, 0.7, 1.2, 0.8]
    verdict = EXACT.judge(pairs(noisy, [0.98 * each for each in noisy]))
    assert verdict.faults == [f"the gain of 2.0% is within the noise of {spread(noisy):.1%}"]


def test_exact_configs_have_equal_losses_to_rounding() -> None:
    assert EXACT.judge(pairs(STEADY, [0.8] * 5, losses=(3.0, 2.0, 1.0 + 1e-5))).recommended
    verdict = EXACT.judge(pairs(STEADY, [0.8] * 5, losses=(3.0, 2.0, 1.01)))
    assert len(verdict.faults) == 1 and "the losses differ" in verdict.faults[0]
    assert not EXACT.judge(pairs(STEADY, [0.8] * 5, losses=(3.0, None, 1.0))).recommended


def test_losses_of_every_pair_count() -> None:
    diverged = [*pairs(STEADY[:4], [0.8] * 4), (run(1.0), run(0.8, losses=(3.0, math.nan, math.nan)))]
    assert not EXACT.judge(diverged).recommended
    assert not Judge(exact=False, random=False, bound=0.01).judge(diverged).recommended


def test_lossy_configs_have_a_bound() -> None:
    lossy = Judge(exact=False, random=False, bound=0.01)
    assert lossy.judge(pairs(STEADY, [0.8] * 5, losses=(3.0, 2.01, 1.005))).recommended
    assert not lossy.judge(pairs(STEADY, [0.8] * 5, losses=(3.0, 2.1, 1.05))).recommended
    assert not lossy.judge(pairs(STEADY, [0.8] * 5, slowdown=1.5)).recommended  # more steps than it saves


def test_losses_are_compared_at_equal_steps() -> None:
    longer = (3.0, 2.5, 2.0, 0.5, 0.1, 0.1)  # a longer period has more steps, and ends lower
    verdict = Judge(exact=False, random=False, bound=0.01).judge(pairs(STEADY, [0.8] * 5, losses=longer))
    assert len(verdict.faults) == 1 and "the loss is +50.00% of today's" in verdict.faults[0]


def test_memory_and_new_advice_speak_against_it() -> None:
    judge = Judge(exact=True, random=False, bound=0.01, memory_bytes=2.0 * 2**30)
    assert judge.judge(pairs(STEADY, [0.8] * 5, gib=1.95)).faults == [
        "the winner takes 1.95 of 2.00 GiB of memory, and 95% are usable"
    ]
    assert judge.judge(pairs(STEADY, [0.8] * 5, gib=1.5)).recommended
    assert judge.judge([(run(1.0, gib=1.95), run(0.8, gib=1.95))] * 5).recommended  # as full as today's
    assert judge.judge(pairs(STEADY, [0.8] * 5, gib=3.0)).faults == [
        "the winner takes 3.00 of 2.00 GiB of memory, and 95% are usable"
    ]
    found = judge.judge(pairs(STEADY, [0.8] * 5, advice=["data waits 7%"]))
    assert found.faults == ["the winner's run is advised what today's is not: data waits 7%; try workers=2"]


def test_advice_is_compared_by_its_name_and_counts_if_most_runs_have_it() -> None:
    both = [(run(1.0, advice=["data waits 9%"]), run(0.8, advice=["data waits 7%"])) for _ in range(5)]
    verdict = EXACT.judge(both)
    assert verdict.recommended and "both are advised: data waits 7%; try workers=2" in verdict.findings
    once = [(run(1.0), run(0.8, advice=["rank 1 is slow"] * (number == 0))) for number in range(5)]
    verdict = EXACT.judge(once)
    assert verdict.recommended
    assert "1 of 5 of the winner's runs are advised: rank 1 is slow; try workers=2" in verdict.findings


def test_a_slow_rank_is_the_same_one_in_most_runs() -> None:
    def late(ranks: tuple[int, ...]) -> list[str]:
        made = [(run(1.0), run(0.8, advice=["rank is slow"], rank=rank)) for rank in ranks]
        verdict = EXACT.judge(made)
        assert verdict.recommended == (not verdict.faults)
        return verdict.faults or [line for line in verdict.findings if "advised" in line]

    words = "rank is slow; try workers=2"
    assert late((0, 1, 2, 0, 3)) == [f"5 of 5 of the winner's runs are advised, of several ranks: {words}"]
    assert late((1, 1, 2, 1, 3)) == [f"the winner's run is advised what today's is not: {words}"]


def test_a_wait_of_the_same_length_is_a_larger_share_of_a_shorter_step() -> None:
    def waiting(seconds: float, data_s: float, advised: bool) -> dict:
        line = {"name": "data_wait", "text": "data", "rank": None, "config": "data.workers=2"}
        return {
            **run(seconds),
            "advice": [line] * advised,
            "phases": {"step": seconds, "data": data_s},
            "spread_s": 0.02,
        }

    same = EXACT.judge([(waiting(1.0, 0.03, False), waiting(0.1, 0.03, True))] * 5)
    assert same.recommended and any("it waits no longer than today's: data" in line for line in same.findings)
    lag = {"name": "straggler", "text": "rank 1", "rank": 1, "config": "hetero_batch"}
    late = EXACT.judge([(waiting(1.0, 0.0, False), {**waiting(0.1, 0.0, True), "advice": [lag]})] * 5)
    assert late.recommended and any("it waits no longer than today's: rank 1" in line for line in late.findings)
    longer = EXACT.judge([(waiting(1.0, 0.03, False), waiting(0.5, 0.1, True))] * 5)
    assert longer.faults == ["the winner's run is advised what today's is not: data; try data.workers=2"]


def test_the_report_shows_where_the_time_goes() -> None:
    phases = {"step": 2.0, "data": 1.0, "forward": 0.5, "backward": 0.49, "checkpoint": 0.01}
    assert in_phases("after", [{"phases": phases}] * 3) == "step times after: data 50%, forward 25%, backward 24%"
    assert in_phases("after", [{"phases": {}}]) == ""


def test_chances_by_hand() -> None:
    assert p_value(5, 5) == 1 / 32 and p_value(3, 3) == 1 / 8 and p_value(4, 5) == 6 / 32 and p_value(0, 5) == 1
    assert spread([1.0, 1.0, 1.0]) == 0
