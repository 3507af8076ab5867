"""checkpoint.every=auto in runs: the first checkpoint measures, the clock follows, and a resume keeps all numbers."""

from pathlib import Path

import pytest
from support.runs import make

from trainer.checkpoint import locate
from trainer.checkpoint.interval import LEAST, daly, prior_s
from trainer.checkpoint.manifest import Damaged
from trainer.config.options import CheckpointOptions
from trainer.errors import ConfigError

AUTO = {"every": "auto", "every_steps": 1, "keep": 9}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.plan.FIRST", 0.0)


def steps() -> list[int]:
    return [int(path.name.split("-")[1]) for path in locate.checkpoints(Path("ckpt/r"))]


def test_the_first_checkpoint_measures_and_the_clock_follows() -> None:
    trainer = make(checkpoint=AUTO, max_steps=6)
    trainer.fit()
    own = trainer.loop.checkpointer.interval
    assert steps() == [1, 6]  # every_steps=1 does not count; the next is due in a minute
    assert own.stall_s > 0 and own.restart_s > 0 and own.failures == 0
    assert trainer.plan.save_s == own.seconds == pytest.approx(max(daly(own.stall_s, prior_s(1)), LEAST))


def test_a_resume_keeps_what_was_measured() -> None:
    first = make(checkpoint=AUTO, max_steps=3)
    first.fit()
    again = make(checkpoint=AUTO, max_steps=6, resume="auto")
    again.fit()
    assert again.loop.checkpointer.interval.stall_s == first.loop.checkpointer.interval.stall_s
    assert again.plan.save_s == first.plan.save_s and steps() == [1, 3, 6]


def test_failures_that_the_supervisor_has_noted_count() -> None:
    make(checkpoint=AUTO, max_steps=3).fit()
    Path("runs/r/logs").mkdir(exist_ok=True)
    Path("runs/r/logs/events.jsonl").write_text('{"failed": "killed", "of_machines": true}\n' * 5)
    trainer = make(checkpoint=AUTO, max_steps=6, resume="auto")
    trainer.fit()
    assert trainer.loop.checkpointer.interval.failures == 5 and trainer.plan.save_s == LEAST


def test_without_auto_nothing_is_kept_and_a_resume_may_begin_with_it() -> None:
    plain = make(max_steps=3)
    plain.fit()
    assert steps() == [2, 3]
    assert "interval" not in (locate.checkpoints(Path("ckpt/r"))[-1] / "state.json").read_text()
    trainer = make(checkpoint=AUTO, max_steps=6, resume="auto")
    trainer.fit()
    assert trainer.loop.checkpointer.interval.stall_s > 0


def test_a_state_that_no_run_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"stall_s": -1.0, "write_s": 0.0, "restart_s": 0.0, "failures": 0}
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.interval.Interval.state_dict", lambda self: odd)
        make(checkpoint=AUTO, max_steps=3).fit()
    with pytest.raises(Damaged, match=r"of interval can't be restored"):
        make(checkpoint=AUTO, max_steps=6, resume="auto").fit()


@pytest.mark.parametrize("value", ["often", 10, ""])
def test_nonsense_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=f"every={value}: must be auto or null"):
        CheckpointOptions(every=value)  # pyright: ignore[reportArgumentType]
