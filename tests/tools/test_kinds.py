"""The classes of Echelon's callbacks by name."""

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.config.compose import CONF
from trainer.tools.kinds import kinds


def test_each_yaml_has_its_class() -> None:
    found = kinds()
    assert found.keys() == {path.stem for path in (CONF / "callbacks").glob("*.yaml")} and found["ema"] is EMA
    assert all(issubclass(kind, Callback) for kind in found.values())
