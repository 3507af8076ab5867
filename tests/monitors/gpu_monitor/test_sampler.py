"""The thread: samples by hand, sources that end, fail or hang, and an end that waits for none of them."""

import threading
import time
from collections.abc import Iterator

import pytest

from trainer import timeouts
from trainer.monitors.gpu_monitor import sampler as sampler_module
from trainer.monitors.gpu_monitor.sampler import LARGEST_RANK, Sampler, combine


def ready(sampler: Sampler, samples: int, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while len(sampler.samples) < samples:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def script(*samples: dict[str, float]) -> tuple[Iterator[dict[str, float]], threading.Event]:
    """A source that gives these samples, then waits until it is closed."""
    closed = threading.Event()

    def source() -> Iterator[dict[str, float]]:
        try:
            yield from samples
            while True:
                yield {}
        finally:
            closed.set()

    return source(), closed


def test_means_largest_and_spread_since_the_last_look():
    source, closed = script(
        {"gpu/utilisation": 0.5, "gpu/memory_gib": 10.0, "gpu/throttled": 1.0},
        {"gpu/utilisation": 1.0, "gpu/memory_gib": 30.0, "gpu/throttled": 0.0, "gpu/nvlink_mib_s": 7.0},
    )
    sampler = Sampler([source], every_s=0.001)
    assert sampler.take() == {}  # before the first sample
    sampler.start()
    ready(sampler, 4)
    found = sampler.take()
    assert found == {
        "gpu/utilisation": 0.75, "gpu/utilisation_spread": 0.5, "gpu/memory_gib": 30.0, "gpu/throttled": 0.5,
        "gpu/nvlink_mib_s": 7.0,
    }  # fmt: skip
    sampler.close()
    assert closed.is_set() and not sampler.thread.is_alive()


def test_steps_shorter_than_a_pause_see_the_newest_sample_again():
    sampler = Sampler([script({"host/cpu": 0.25})[0]], every_s=1000.0)
    sampler.start()
    ready(sampler, 1)
    assert [sampler.take() for _ in range(3)] == [{"host/cpu": 0.25}] * 3
    began = time.monotonic()
    sampler.close()  # in the middle of a pause
    assert not sampler.thread.is_alive() and time.monotonic() - began < 500


def test_a_source_that_ends_or_fails_leaves_the_others(monkeypatch):
    said = list[str]()
    monkeypatch.setattr(sampler_module.log, "warning", lambda form, *args: said.append(form % args))

    def failing() -> Iterator[dict[str, float]]:
        yield {"gpu/power_w": 1.0}
        raise ZeroDivisionError("of the source")

    sampler = Sampler([iter([{"gpu/sm_mhz": 1.0}]), failing(), script(*[{"host/cpu": 0.5}] * 9)[0]], every_s=0.001)
    sampler.start()
    ready(sampler, 6)
    sampler.close()
    assert [sorted(sample) for sample in sampler.samples[:3]] == [
        ["gpu/power_w", "gpu/sm_mhz", "host/cpu"], ["host/cpu"], ["host/cpu"]
    ]  # fmt: skip
    assert said == [
        "gpu_monitor: a source of numbers failed, and training continues: ZeroDivisionError('of the source')"
    ]


def test_a_device_that_never_answers_holds_up_no_look_and_no_end(monkeypatch):
    monkeypatch.setattr(timeouts, "MONITOR_S", 0.05)
    answer, asked = threading.Event(), threading.Event()

    def hanging() -> Iterator[dict[str, float]]:
        asked.set()
        answer.wait()
        yield {}

    sampler = Sampler([hanging()], every_s=0.001)
    sampler.start()
    assert asked.wait(20)
    assert sampler.take() == {}
    sampler.close()
    assert sampler.thread.is_alive() and sampler.thread.daemon
    answer.set()
    sampler.thread.join(20)
    assert not sampler.thread.is_alive()


@pytest.mark.parametrize(
    ("name", "value"), [("gpu/temperature_c", 80.0), ("gpu/utilisation_spread", 80.0), ("host/cpu", 60.0)]
)
def test_of_ranks_the_largest_or_the_mean(name, value):
    assert combine(name, [40.0, 80.0]) == value


@pytest.mark.parametrize(("name", "value"), [("gpu/pcie_rx_mib_s", 80.0), ("gpu/utilisation", 60.0)])
def test_pcie_is_the_largest_of_ranks_and_the_mean_of_samples(name, value):
    assert combine(name, [40.0, 80.0]) == 60.0 and combine(name, [40.0, 80.0], LARGEST_RANK) == value
