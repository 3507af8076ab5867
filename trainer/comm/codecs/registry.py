"""The codecs by name, and the knobs that each has."""

import inspect
from typing import Any

from trainer.comm.codecs.base import Codec
from trainer.comm.codecs.blocksparse import BlockSparse
from trainer.comm.codecs.cast import BFloat16, Float16
from trainer.comm.codecs.dgc import DGC
from trainer.comm.codecs.int8 import Int8
from trainer.comm.codecs.powersgd import PowerSGD
from trainer.comm.codecs.sign import Sign
from trainer.comm.codecs.topk import TopK
from trainer.errors import ConfigError, require_one_of

CODECS: dict[str, type[Codec]] = {
    "bf16": BFloat16,
    "fp16": Float16,
    "int8": Int8,
    "topk": TopK,
    "dgc": DGC,
    "sign": Sign,
    "powersgd": PowerSGD,
    "blocksparse": BlockSparse,
}


def make(name: str, knobs: dict[str, Any]) -> Codec:
    """Make the codec `name`.

    Raises:
        ConfigError: There is no such codec, or the codec lacks a given knob.
    """
    require_one_of("callbacks.grad_compress.codec", name, CODECS)
    known = inspect.signature(CODECS[name]).parameters
    given = {knob: value for knob, value in knobs.items() if value is not None}
    for knob in given.keys() - known.keys():
        raise ConfigError(
            f"callbacks.grad_compress.{knob}={given[knob]}: codec={name} has no such knob; "
            f"leave it out (its knobs: {', '.join(known) or 'none'})"
        )
    return CODECS[name](**given)


def refuse(name: str, codec: Codec, feedback: bool | None, level: str) -> None:
    """Refuse settings that have no effect on this codec.

    Raises:
        ConfigError: The message names the setting.
    """
    if feedback and (codec.kept or codec.exact):
        why = "sends everything" if codec.exact else "has an error feedback of its own"
        raise ConfigError(f"callbacks.grad_compress.feedback=true: codec={name} {why}; leave feedback out")
    if level == "inter" and name == "powersgd":
        raise ConfigError(
            "callbacks.grad_compress.level=inter: between nodes a rank has a part of each matrix, and "
            "codec=powersgd needs whole matrices; use level=all, or another codec"
        )
