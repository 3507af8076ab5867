"""The codecs by name, and the knobs that each has."""

import inspect
from typing import Any

from trainer.codecs.blocksparse import BlockSparse
from trainer.codecs.cast import BFloat16, Float16
from trainer.codecs.codec import Codec
from trainer.codecs.dgc import DGC
from trainer.codecs.int8 import Int8
from trainer.codecs.powersgd import PowerSGD
from trainer.codecs.sign import Sign
from trainer.codecs.topk import TopK
from trainer.errors import ConfigError

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
    """Raises:
    ConfigError: for a knob that this codec does not have.
    """
    known = inspect.signature(CODECS[name]).parameters
    given = {knob: value for knob, value in knobs.items() if value is not None}
    for knob in given.keys() - known.keys():
        raise ConfigError(
            f"callbacks.grad_compress.{knob}={given[knob]}: codec={name} has no such knob; "
            f"leave it out (its knobs: {', '.join(known) or 'none'})"
        )
    return CODECS[name](**given)
