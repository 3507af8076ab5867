"""The performance of this machine's links, codecs, cores, memory and disk, as measured by the bench."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """One level of the network, as one rank uses it in each direction while its node's other ranks do the same."""

    latency_s: float  # of an empty message
    bytes_per_s: float  # of a long message; infinite if there is no such link
    cpu_s_per_byte: float  # over all of a rank's threads, per byte sent and per byte received
    all_gather: float = 1.0  # the rate of the library's collective, relative to its all-reduce's, `bytes_per_s`
    reduce_scatter: float = 1.0  # likewise


@dataclass(frozen=True)
class CodecCost:
    """Seconds of one rank per byte of float32 gradient: `encode + payloads * decode`.

    Codecs that gather decode each rank's payload. For all others, decoding is part of `encode_s_per_byte`.
    """

    encode_s_per_byte: float
    decode_s_per_byte: float


@dataclass(frozen=True)
class Machine:
    ranks: int
    ranks_per_node: int
    cores_per_rank: float  # a fraction if ranks share cores
    inside: Link  # between the ranks of a node
    across: Link  # between nodes
    codecs: Mapping[str, CodecCost]
    memory_bytes: float | None  # of a rank's device; None if unknown
    disk_bytes_per_s: float  # write rate, including the sync to disk
    background: bool = True  # collectives overlap with the passes, as NCCL's do; gloo's block the computing thread


def to_json(machine: Machine) -> dict[str, Any]:
    """Return the machine as JSON values; null is an infinite rate."""
    found = asdict(machine)
    for link in (found["inside"], found["across"]):
        link["bytes_per_s"] = None if math.isinf(link["bytes_per_s"]) else link["bytes_per_s"]
    found["disk_bytes_per_s"] = None if math.isinf(machine.disk_bytes_per_s) else machine.disk_bytes_per_s
    return found


def from_json(value: Mapping[str, Any]) -> Machine:
    """Invert `to_json`."""

    def rate(number: float | None) -> float:
        return math.inf if number is None else number

    links = {name: Link(**{**value[name], "bytes_per_s": rate(value[name]["bytes_per_s"])}) for name in LEVELS}
    codecs = {name: CodecCost(**cost) for name, cost in value["codecs"].items()}
    return Machine(**{**value, **links, "codecs": codecs, "disk_bytes_per_s": rate(value["disk_bytes_per_s"])})


LEVELS = ("inside", "across")
