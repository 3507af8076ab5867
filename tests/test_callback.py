"""A callback's class: its hooks have the names that there are."""

import pytest

from trainer.callback import Callback


@pytest.mark.parametrize("name", ["on_stepend", "wrap_loss", "rehearsal", "Split"])
def test_a_misspelt_hook_is_refused_when_the_class_is_defined(name):
    with pytest.raises(TypeError, match=rf"^Wrong: unknown hooks \['{name}'\]; the hooks are build_model, "):
        type("Wrong", (Callback,), {name: lambda self, trainer: None})
