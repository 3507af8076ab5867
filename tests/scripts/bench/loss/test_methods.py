"""Methods can be built, and are timed after their warm-up."""

from scripts.bench.loss.methods import METHODS, timed


def test_every_method_can_be_built() -> None:
    for method in METHODS.values():
        for row in (method.row, method.timed or method.row):
            assert row.build().keys() == row.callbacks.keys()
    assert timed("").run == "alone" and timed("ddp").run == "ddp"


def test_timed_steps_are_those_after_the_warm_up_and_the_others_count_as_ddp() -> None:
    method = METHODS["onebit_adam"]
    warm_ups = [row.build()["onebit_adam"].warmup_steps for row in (method.row, timed("onebit_adam"))]
    assert warm_ups[0] == method.plain and warm_ups[1] < timed("onebit_adam").warm
