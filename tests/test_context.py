"""What callbacks get, without a trainer."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.context import KNOWN, Command, Context


def make() -> Context:
    job: Any = SimpleNamespace(recipe=object(), name="run", batch=12, options=None, command=Command())
    plan: Any = SimpleNamespace(resumed=None)
    return Context(job, plan, SimpleNamespace(rank=0, world=1, device="cpu"))  # pyright: ignore[reportArgumentType]


def test_the_state_is_read_through_the_context_without_a_python_call():
    context, calls = make(), []
    context.state.step, context.state.samples = 7, 84
    sys.setprofile(lambda frame, event, _: calls.append(event))
    step, samples, best = context.step, context.samples, context.seconds
    sys.setprofile(None)
    assert (step, samples, best) == (7, 84, 0.0) and "call" not in calls
    context.lag = 1
    assert context.state.lag == context.lag == 1
    with pytest.raises(AttributeError):
        context.step = 3


def test_the_first_reason_to_stop_counts():
    context = make()
    assert not context.stop_reason
    context.stop("early_stop")
    context.stop("max_steps")
    assert context.stop_reason == "early_stop"


def test_all_attributes_are_known():
    assert vars(make()).keys() <= KNOWN and "rehearsing" in KNOWN and "emit" in KNOWN
