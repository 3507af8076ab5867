"""A machine as the cost model sees it: its ranks, its links, and what codecs cost a rank."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One level of the network, as one rank has it, each way."""

    latency_s: float  # of an empty message
    bytes_per_s: float
    cpu_s_per_byte: float  # processor seconds of a rank for a byte that it sends, the byte that it receives included


@dataclass(frozen=True)
class CodecCost:
    """Processor seconds of a codec, per byte of a float32 gradient."""

    encode_s_per_byte: float
    decode_s_per_byte: float  # of one payload


@dataclass(frozen=True)
class Machine:
    ranks: int
    ranks_per_node: int
    cores_per_rank: float
    inside: Link  # between ranks of a node
    across: Link  # between nodes: a rank's share while all ranks of its node send
    codecs: Mapping[str, CodecCost]  # by name; "none": a plain bucket's copies
    memory_bytes: float | None  # that a rank may take; None: unknown
    disk_bytes_per_s: float
