"""A machine of the test's own, whose processors work as told: what a rank's part of that is, and when it is unknown."""

import os
from pathlib import Path
from typing import Any

import pytest

from trainer.comm.ranks import Ranks
from trainer.process.environment import Place
from trainer.tools.measure import host
from trainer.tools.measure.host import Meter

TICK = os.sysconf("SC_CLK_TCK")


class Machine:
    """Four processors. Time goes on when somebody sleeps or the test says so."""

    def __init__(self, proc: Path, patch: pytest.MonkeyPatch) -> None:
        self.proc, self.now, self.idle, self.steal, self.by_itself = proc, 1000.0, 4000.0, 0.0, 0.0
        patch.setattr(host.time, "monotonic", lambda: self.now)
        patch.setattr(host.time, "sleep", lambda seconds: self.work(seconds, 0.0))
        self.work(0.0, 0.0)

    def work(self, seconds: float, busy: float, steal: float = 0.0) -> None:
        """Let time pass, in which so many processors work beside those that work by themselves."""
        self.now += seconds
        self.idle += seconds * (4 - busy - self.by_itself - steal)
        self.steal += seconds * steal
        own = f"0 0 0 {round(self.idle * TICK)} 0 0 0 {round(self.steal * TICK)} 0 0"
        lines = [f"cpu  {own}", *(f"cpu{n} 1 2 3 4 5 6 7 8 9 0" for n in range(4)), "intr 1 2 3", "ctxt 4"]
        (self.proc / "stat").write_text("\n".join(lines) + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


class Two:
    """Stands for two ranks, on the same machine or not."""

    def __init__(self, same: bool) -> None:
        self.same = same

    def gather(self, own: Any) -> list[Any]:
        return [own, own if self.same else "other" if isinstance(own, str) else own]


def meter(machine: Machine, same: bool) -> Meter:
    ranks: Any = Two(same)
    return Meter(ranks, machine.proc)


@pytest.mark.parametrize(("same", "part"), [(True, 1.5), (False, 3.0)])
def test_the_ranks_of_a_machine_share_what_it_does(same: bool, part: float, machine: Machine) -> None:
    own = meter(machine, same)
    began = own.begin()
    machine.work(2.0, 1.5)
    assert own.quiet and own.load == 0.0
    assert own.end(began) == pytest.approx(part, abs=2 / TICK)


def test_what_the_machine_does_by_itself_and_what_is_stolen_do_not_count(machine: Machine) -> None:
    machine.by_itself = 0.1
    own = meter(machine, True)
    assert own.load == pytest.approx(0.1 / 4, abs=0.01)
    began = own.begin()
    machine.work(10.0, 1.0, steal=0.5)
    assert own.end(began) == pytest.approx(5.0, abs=0.5)


def test_a_machine_that_works_by_itself_tells_nothing(machine: Machine) -> None:
    machine.by_itself = 1.0
    own = meter(machine, True)
    assert own.load == pytest.approx(0.25, abs=0.01) and not own.quiet
    assert own.begin() is None and own.end(None) is None


@pytest.mark.parametrize("content", ["", "cpu 1 2\n", "cpu  a b c d e f g h\ncpu0\n"])
def test_a_file_of_another_form_tells_nothing(content: str, machine: Machine) -> None:
    (machine.proc / "stat").write_text(content)
    machine.work = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    own = meter(machine, True)
    assert (own.load, own.quiet, own.begin()) == (1.0, False, None)


def test_this_machine_is_read() -> None:
    own = Meter(Ranks(Place(), "cpu", "gloo", 60))
    own.quiet, own.base = True, 0.0
    began, worked = own.begin(), host.time.process_time()
    while host.time.process_time() - worked < 0.2:
        pass
    assert (own.end(began) or 0.0) > 0
