"""Describes what a step costs on this machine: links, codecs, cores, memory and disk, as the bench measures them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """One level of the network, as one rank uses it each way while the other ranks of its node do the same.

    Attributes:
        latency_s: Seconds of an empty message.
        bytes_per_s: Rate of a long message; infinite if there is no such link.
        cpu_s_per_byte: CPU seconds of all threads of a rank, for each byte that it sends and each that it receives.
        all_gather, reduce_scatter: Rates of the library's collectives, as shares of `bytes_per_s`, the all-reduce's.
    """

    latency_s: float
    bytes_per_s: float
    cpu_s_per_byte: float
    all_gather: float = 1.0
    reduce_scatter: float = 1.0


@dataclass(frozen=True)
class CodecCost:
    """Seconds of one rank for each byte of float32 gradient: `encode + ranks * decode`.

    A codec that gathers decodes the payload of each rank. The others decode once for any number of ranks, and that is
    part of `encode_s_per_byte`.
    """

    encode_s_per_byte: float
    decode_s_per_byte: float


@dataclass(frozen=True)
class Machine:
    """The machine of a run.

    Attributes:
        cores_per_rank: CPU cores that a rank has for itself; ranks that share cores have a part of each.
        inside, across: Links between the ranks of a node, and between nodes.
        memory_bytes: Memory of a rank's device; None if unknown.
        disk_bytes_per_s: Rate of writing, including the sync to disk.
        background: The library's collectives overlap with the passes, like NCCL's. gloo's block the computing thread.
    """

    ranks: int
    ranks_per_node: int
    cores_per_rank: float
    inside: Link
    across: Link
    codecs: Mapping[str, CodecCost]
    memory_bytes: float | None
    disk_bytes_per_s: float
    background: bool = True


def to_json(machine: Machine) -> dict[str, Any]:
    """Return the machine as JSON values; null stands for an infinite rate."""
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
