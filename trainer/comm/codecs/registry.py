"""The codecs by name, and each codec's knobs."""

import inspect
from typing import Any, Literal, get_args

from trainer.comm.codecs.base import Codec
from trainer.comm.codecs.blocksparse import BlockSparse
from trainer.comm.codecs.cast import BFloat16, Float16
from trainer.comm.codecs.dgc import DGC
from trainer.comm.codecs.int8 import Int8
from trainer.comm.codecs.powersgd import PowerSGD
from trainer.comm.codecs.sign import Sign
from trainer.comm.codecs.topk import TopK
from trainer.errors import ConfigError, require_one_of

CodecName = Literal["bf16", "fp16", "int8", "topk", "dgc", "sign", "powersgd", "blocksparse"]
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
assert get_args(CodecName) == tuple(CODECS), "registry.py: name each codec in CodecName, too"


def make(name: str, knobs: dict[str, Any]) -> Codec:
    """Make the codec `name`; a knob that is None keeps its default. Raise ConfigError for an unknown name or knob."""
    require_one_of("codec", name, CODECS)
    known = inspect.signature(CODECS[name]).parameters
    given = {knob: value for knob, value in knobs.items() if value is not None}
    for knob in given.keys() - known.keys():
        raise ConfigError(
            f"codec.{knob}={given[knob]}: codec={name} has no such knob; "
            f"leave it out (its knobs: {', '.join(known) or 'none'})"
        )
    return CODECS[name](**given)


def name_of(codec: Codec) -> str:
    """Return a codec's name in the registry, or the full class name if it is not registered."""
    kind = type(codec)
    return next((name for name, own in CODECS.items() if own is kind), f"{kind.__module__}.{kind.__qualname__}")
