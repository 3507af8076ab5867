"""The reduction of a bucket: what the codec computes, and what is sent on which level."""

from collections.abc import Iterable
from typing import NamedTuple

from trainer.cost.collectives import Wire, add, time, two_levels
from trainer.cost.machine import CodecCost
from trainer.cost.messages import Message, plain
from trainer.cost.messages import sent as sent_bytes
from trainer.cost.setup import NO_COST, Bucket, Setup
from trainer.cost.simulate import Job, Phase


class Reduction(NamedTuple):
    """The reduction of one or more buckets. Codec seconds are CPU time."""

    encode_s: float
    wire: Wire
    decode_s: float
    sent_bytes: float

    def job(self, codec: bool = True) -> Job:
        cores = min(1.0, self.wire.cpu_s / self.wire.seconds) if self.wire.seconds else 0.0
        seconds = (self.encode_s * codec, 1.0), (self.wire.seconds, cores), (self.decode_s * codec, 1.0)
        return Job(tuple(Phase(*each) for each in seconds))


def total(reductions: Iterable[Reduction]) -> Reduction:
    """Return the sum of sequential reductions."""
    each = list(reductions)
    encode_s, decode_s = (sum(getattr(one, name) for one in each) for name in ("encode_s", "decode_s"))
    return Reduction(encode_s, add(one.wire for one in each), decode_s, sum(one.sent_bytes for one in each))


def reduce(setup: Setup, bucket: Bucket) -> Reduction:
    group = setup.group
    if setup.two_levels and group.nodes > 1 and group.per_node > 1:
        return in_two_levels(setup, bucket)
    sent = messages(setup, bucket, group.ranks)
    wire = add(time(message, group, setup.machine, setup.algorithm) for message in sent)
    return with_codec(setup, 4 * bucket.elements, group.ranks, wire, sent_bytes(sent, group.ranks))


def messages(setup: Setup, bucket: Bucket, ranks: int) -> list[Message]:
    codec = setup.codec.codec
    return codec.messages(bucket.shapes, ranks) if codec else plain(bucket.shapes)


def in_two_levels(setup: Setup, bucket: Bucket) -> Reduction:
    """Return a reduction in two levels. A codec between nodes encodes only the rank's share of the bucket."""
    group, between = setup.group, setup.codec.between_nodes
    whole = messages(setup, bucket, group.nodes)
    across = [Message(name, size / group.per_node) for name, size in whole]
    inside = 4 * bucket.elements if between else sum(size for _, size in whole)
    wire = two_levels(inside, group, setup.machine, across, setup.algorithm)
    sent = 2 * Message("all_gather", inside).sent(group.per_node) + sent_bytes(across, group.nodes)
    coded = 4 * bucket.elements / (group.per_node if between else 1)
    return with_codec(setup, coded, group.nodes, wire, sent)


def with_codec(setup: Setup, size: float, ranks: int, wire: Wire, sent: float) -> Reduction:
    """Return a reduction whose codec encodes `size` bytes of float32, and averages `ranks` payloads."""
    codec, name = setup.codec.codec, setup.codec.codec_name
    if codec is None:
        return Reduction(0.0, wire, 0.0, sent)
    own = setup.machine.codecs.get(name, NO_COST)
    return Reduction(size * own.encode_s_per_byte, wire, size * own.decode_s_per_byte * codec.decodes(ranks), sent)


def copying(setup: Setup) -> CodecCost:
    """Return the cost of copying a gradient into its bucket and back."""
    return setup.machine.codecs.get("none", NO_COST) if setup.copies else NO_COST


def copies_s(setup: Setup, count: float) -> float:
    own = copying(setup)
    return count * setup.gradient_bytes * (own.encode_s_per_byte + own.decode_s_per_byte) / 2
