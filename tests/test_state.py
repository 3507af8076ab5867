"""How far a run is, without a run."""

import math
from typing import Any

from trainer.state import TrainingState


def validated(state: TrainingState, step: int, **metrics: float) -> TrainingState:
    state.step = state.validated_step = step
    state.validation = {f"val/{name}": value for name, value in metrics.items()}
    return state


def test_a_state_is_restored_with_its_seconds():
    state = validated(TrainingState(), 3, loss=0.5)
    state.samples, state.started = 36, state.started - 100
    state.count_seconds()
    assert state.note_best("val/loss", {})
    again = TrainingState()
    again.load_state_dict(state.state_dict())
    assert again.state_dict() == state.state_dict() and again.loaded == (3, 3)
    again.start_clocks()
    again.count_seconds()
    assert again.seconds >= state.seconds >= 100


def test_the_best_is_that_of_its_own_metric_and_direction():
    state, record = TrainingState(), dict[str, Any]()
    taken = []
    for step, loss in enumerate((0.5, 0.6, 0.4, math.nan, 0.4), 1):
        taken.append(validated(state, step, loss=loss).note_best("val/loss", record))
        record = state.best
    assert taken == [True, False, True, False, False] and state.best == {"metric": "val/loss", "value": 0.4, "step": 3}
    assert not validated(state, 6, loss=0.1).note_best("val/accuracy", record)
    assert validated(state, 7, accuracy=0.1).note_best("max val/accuracy", record)
    assert validated(state, 8, accuracy=0.2).note_best("max val/accuracy", state.best)
    assert not validated(state, 9, accuracy=0.1).note_best("max val/accuracy", state.best)


def test_a_best_validation_whose_checkpoint_was_not_written_does_not_count():
    state = TrainingState()
    for step, loss in ((1, 0.5), (2, 0.4)):
        assert validated(state, step, loss=loss).note_best("val/loss", {})
    state.unwritten = {2}
    assert state.best["step"] == 1
    state.unwritten = {1, 2}
    assert state.best == {}
