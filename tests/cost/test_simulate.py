"""Steps by hand: one thread, one link, few cores."""

import pytest

from trainer.cost.simulate import Job, Phase, Task, rates, simulate


def wire(seconds: float, cores: float = 0.0, urgency: float = 0.0) -> Job:
    return Job((Phase(seconds, cores),), urgency)


def test_a_job_runs_beside_the_next_task() -> None:
    tasks = [Task(1.0, starts=(0,)), Task(2.0), Task(0.5, needs=(0,))]
    assert simulate(tasks, [wire(1.5)], 1.0) == pytest.approx([1.0, 3.0, 3.5])
    assert simulate(tasks, [wire(4.0)], 1.0) == pytest.approx([1.0, 3.0, 5.5])


def test_the_link_serves_one_job_at_a_time_and_the_most_urgent_first() -> None:
    tasks = [Task(1.0, starts=(0, 1)), Task(0.0, needs=(1,)), Task(0.0, needs=(0,))]
    assert simulate(tasks, [wire(2.0), wire(3.0)], 1.0) == pytest.approx([1.0, 6.0, 6.0])
    assert simulate(tasks, [wire(2.0, urgency=1), wire(3.0)], 1.0) == pytest.approx([1.0, 4.0, 6.0])


def test_on_one_core_communication_takes_time_that_computing_needs() -> None:
    """A wire that takes a quarter of a core for 2 s slows 3 s of computing by half a second."""
    tasks = [Task(0.0, starts=(0,)), Task(3.0)]
    assert simulate(tasks, [wire(2.0, 0.25)], 1.0) == pytest.approx([0.0, 3.5])
    assert simulate(tasks, [wire(2.0, 0.25)], 1.25) == pytest.approx([0.0, 3.0])


def test_a_codec_shares_the_core_as_an_equal() -> None:
    """Encoding for 1 s beside 3 s of computing: half speed each for 2 s, then computing alone for 2 s."""
    tasks = [Task(0.0, starts=(0,)), Task(3.0), Task(0.0, needs=(0,))]
    assert simulate(tasks, [wire(1.0, 1.0)], 1.0) == pytest.approx([0.0, 4.0, 4.0])
    assert simulate(tasks, [wire(1.0, 1.0)], 2.0) == pytest.approx([0.0, 3.0, 3.0])


def test_ranks_that_share_a_core_compute_alone_as_they_were_measured() -> None:
    assert rates(0.5, True, 0.0) == (1.0, 1.0) and rates(0.5, False, 1.0) == (0.0, 0.5)


def test_a_job_that_nobody_starts_is_an_error_of_the_model() -> None:
    with pytest.raises(ValueError, match="task 0 needs jobs"):
        simulate([Task(1.0, needs=(0,))], [wire(1.0)], 1.0)
