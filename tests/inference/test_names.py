"""Callbacks as a list: Echelon's own have the config's names, so that a command and a program resume each other."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from support.messages import refuses

from trainer.callback import Callback
from trainer.callbacks.ema import EMA
from trainer.config.targets import locate
from trainer.errors import ConfigError
from trainer.inference.names import by_name, name_of_class
from trainer.loggers.progress.callback import Progress
from trainer.monitors.throughput import Throughput

CONF = Path(__file__).parents[2] / "conf" / "callbacks"


class HTTPServer2Watch(Callback):
    pass


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_own_callbacks_have_the_names_of_the_config(name):
    target = OmegaConf.load(CONF / f"{name}.yaml")[name]._target_
    assert name_of_class(locate("callbacks", target, ())) == name


def test_a_list_is_named_by_class():
    ema, own = EMA(), HTTPServer2Watch()
    assert by_name([ema, own]) == {"ema": ema, "http_server2_watch": own}
    assert by_name(iter([ema])) == {"ema": ema}
    assert by_name(None) == {} and by_name({"a": ema}) == {"a": ema}


def test_two_of_a_class_are_refused():
    with refuses("callbacks", "EMA", "EMA(...)", "EMA(...)"):
        by_name([EMA(), Throughput(), EMA()])


@pytest.mark.parametrize("given", [EMA(), "ema", 3])
def test_what_is_no_list_is_refused(given):
    with pytest.raises(ConfigError, match=r"^callbacks: is a value of type \w+; give a list, as \[EMA\(\)\], or"):
        by_name(given)


def test_a_list_in_a_notebook_gets_progress_and_a_dict_is_as_given(monkeypatch):
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert [*by_name(None)] == [*by_name([])] == ["progress"] and [*by_name([Progress()])] == ["progress"]
    assert [*by_name({})] == []
    kernel.get_ipython = SimpleNamespace  # a terminal's IPython has no kernel
    assert [*by_name(None)] == []


def test_a_callback_prints_as_its_call():
    assert repr(EMA(decay=0.5)).startswith("EMA(decay=0.5")
    assert repr(Progress()) == "Progress()"
