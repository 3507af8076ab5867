"""Codecs by name: each with its own knobs, and settings that say nothing are refused."""

import inspect
import re

import pytest
from support.messages import refuses

from trainer.comm.codecs.base import Codec
from trainer.comm.codecs.registry import CODECS, make, name_of
from trainer.errors import ConfigError


@pytest.mark.parametrize("name", CODECS)
def test_each_has_its_defaults_and_takes_only_its_own_knobs(name):
    own = ", ".join(inspect.signature(CODECS[name]).parameters) or "none"
    assert type(make(name, {"density": None, "rank": None})) is CODECS[name]
    told = f"codec.wings=2: codec={name} has no such knob; leave it out (its knobs: {own})"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        make(name, {"wings": 2})


def test_an_unknown_one_is_told():
    with refuses("codec=topkk", "unknown"):
        make("topkk", {})


def test_a_codec_has_its_name_and_another_class_its_full_name():
    class Other(Codec):
        pass

    assert [name_of(kind()) for kind in CODECS.values()] == list(CODECS)
    assert name_of(Other()) == f"{__name__}.{Other.__qualname__}"
