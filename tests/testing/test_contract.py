"""`check_callback` finds what is wrong with a callback, and nothing wrong with those of Echelon."""

import pytest

from trainer.callback import Callback, Role
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.testing import check_callback

SHORT = {"steps": 4}


class Shrinks(Callback):
    """Changes weights: by an amount that is a state of its own."""

    role = Role.GUARD
    exact = False

    def __init__(self, saves: bool = True, by_rank: bool = False) -> None:
        self.by, self.saves, self.by_rank = 1e-2, saves, by_rank

    def on_step_end(self, trainer) -> None:
        for p in trainer.parameters:
            p.data.mul_(1 - self.by * (1 + trainer.rank * self.by_rank))
        self.by /= 2

    def state_dict(self):
        return {"by": self.by} if self.saves else {}

    def load_state_dict(self, state) -> None:
        self.by = state.get("by", self.by)


class LastMicroBatch(Callback):
    """Exact with one micro-batch only: it drops the gradients of the others."""

    def wrap_forward_backward(self, trainer, run):
        def passes(data, total):
            losses = run(data, total)
            for p in trainer.parameters:
                p.grad.mul_(1.0 if len(losses) == 1 else 0.5)
            return losses

        return passes


class Fails(Callback):
    def on_fit_start(self, trainer) -> None:
        if trainer.rank == 1:
            raise OSError("no such thing")


def test_exact_and_lossy_callbacks_keep_their_promises():
    assert check_callback(lambda: EMA(decay=0.8), ranks=1, **SHORT) == {1: 0.0}
    found = check_callback(lambda: GradCompress("int8"), bound=0.2, **SHORT)
    assert found[1] == 0.0 and 1e-6 < found[2] < 0.2  # on one rank there is nothing to compress


def test_state_that_is_not_saved_and_a_bound_that_does_not_hold():
    with pytest.raises(AssertionError) as broken:
        check_callback(lambda: Shrinks(saves=False), bound=1e-3, **SHORT)
    text = str(broken.value)
    assert "Shrinks on 2 rank(s), accumulate=2: a resumed run has other bits of model.first.weight" in text
    assert "more than bound=0.001" in text and len(text.splitlines()) == 8


def test_ranks_that_drift_apart():
    with pytest.raises(AssertionError, match=r"(?s)rank \d of 2: .*NumericsError"):
        check_callback(lambda: Shrinks(by_rank=True), **SHORT)


def test_micro_batches_that_count_for_less():
    with pytest.raises(AssertionError) as broken:
        check_callback(LastMicroBatch, ranks=1, **SHORT)
    assert "LastMicroBatch on 1 rank(s), accumulate=2: weights differ by" in str(broken.value)
    assert len(str(broken.value).splitlines()) == 1


def test_an_error_on_one_rank_is_told_with_its_rank():
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2: .*OSError: no such thing"):
        check_callback(Fails, **SHORT)


def test_a_callback_that_says_it_is_lossy_and_is_not():
    class Idle(Callback):
        exact = False

    with pytest.raises(AssertionError, match="set exact = True"):
        check_callback(Idle, ranks=1, **SHORT)
