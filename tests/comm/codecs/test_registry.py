"""Codecs by name: each with its own knobs, and settings that say nothing are refused."""

import inspect
import re

import pytest

from trainer.comm.codecs.registry import CODECS, make, refuse
from trainer.errors import ConfigError


@pytest.mark.parametrize("name", CODECS)
def test_each_has_its_defaults_and_takes_only_its_own_knobs(name):
    own = ", ".join(inspect.signature(CODECS[name]).parameters) or "none"
    assert type(make(name, {"density": None, "rank": None})) is CODECS[name]
    told = f"callbacks.grad_compress.wings=2: codec={name} has no such knob; leave it out (its knobs: {own})"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        make(name, {"wings": 2})


def test_an_unknown_one_is_told():
    with pytest.raises(ConfigError, match=r"^callbacks\.grad_compress\.codec=topkk: is unknown; did you mean topk\?"):
        make("topkk", {})


@pytest.mark.parametrize(
    ("name", "feedback", "level", "words"),
    [
        ("dgc", True, "all", r"feedback=true: codec=dgc has an error feedback of its own; leave feedback out"),
        ("blocksparse", True, "all", r"feedback=true: codec=blocksparse sends everything; leave feedback out"),
        ("powersgd", None, "inter", r"level=inter: .*; use level=all, or another codec"),
    ],
)
def test_what_means_nothing_for_a_codec_is_refused(name, feedback, level, words):
    with pytest.raises(ConfigError, match=rf"^callbacks\.grad_compress\.{words}$"):
        refuse(name, make(name, {}), feedback, level)
    refuse(name, make(name, {}), False, "all")
    refuse("topk", make("topk", {}), feedback, level)
