"""The settings of a search, apart from those of the run."""

import pytest

from trainer.errors import ConfigError
from trainer.tools.tune.options import TuneOptions, read_options


def test_settings_of_the_search_are_taken_out() -> None:
    words = ["recipe=toy", "tune.budget_s=1e2", "+tune.lossy=true", "trainer.devices=2", "tune.name=my-2.1"]
    options, rest = read_options(words)
    assert options == TuneOptions(budget_s=100.0, lossy=True, name="my-2.1")
    assert rest == ["recipe=toy", "trainer.devices=2"]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("tune.budget=3", "tune.budget=3: no such key; did you mean budget_s"),
        ("tune.budget_s=0", "tune.budget_s=0: must be more than 0"),
        ("tune.budget_s=-1.5", "tune.budget_s=-1.5: must be more than 0"),
        ("tune.budget_s=soon", "tune.budget_s=soon: must be float, not str"),
        ("tune.lossy=3", "tune.lossy=3: must be bool, not int"),
        ("tune.pairs=2", "tune.pairs=2: must be at least 5"),
        ("tune.without=[compiel]", "tune.without=compiel: no such callback; did you mean compile"),
        ("tune.name=../x", "tune.name=../x: must be the name of a file"),
        ("tune.steps", "tune.steps: has no value; give tune.steps=VALUE"),
        ("tune.steps={a", "tune: "),
    ],
)
def test_wrong_settings_are_one_line(word: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_options([word])
    assert str(error.value).startswith(reason) and "\n" not in str(error.value)
