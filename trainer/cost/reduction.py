"""The reduction of a bucket on a rank: what its codec computes, what is sent, on which levels."""

from collections.abc import Iterable
from typing import NamedTuple

from trainer.cost import messages
from trainer.cost.buckets import Bucket
from trainer.cost.collectives import Wire, add, time, two_levels
from trainer.cost.machine import CodecCost
from trainer.cost.messages import Message
from trainer.cost.setup import Setup
from trainer.cost.simulate import Job, Phase

NO_COST = CodecCost(0.0, 0.0)


class Reduction(NamedTuple):
    """The reduction of some gradients. Codec seconds are the processor's."""

    encode_s: float
    wire: Wire
    decode_s: float
    sent_bytes: float

    def job(self, codec: bool = True) -> Job:
        """Return the job, with or without the codec's work."""
        cores = min(1.0, self.wire.cpu_s / self.wire.seconds) if self.wire.seconds else 0.0
        seconds = (self.encode_s * codec, 1.0), (self.wire.seconds, cores), (self.decode_s * codec, 1.0)
        return Job(tuple(Phase(*each) for each in seconds))


def total(reductions: Iterable[Reduction]) -> Reduction:
    """Return reductions one after another."""
    each = list(reductions)
    encode_s, decode_s = (sum(getattr(one, name) for one in each) for name in ("encode_s", "decode_s"))
    return Reduction(encode_s, add(one.wire for one in each), decode_s, sum(one.sent_bytes for one in each))


def reduce(setup: Setup, bucket: Bucket) -> Reduction:
    """Return the reduction of a bucket over the ranks with different data."""
    group, codec, knobs = setup.group, setup.codec, setup.callbacks.get("grad_compress", {})
    if "hierarchical" in setup.callbacks and group.nodes > 1 and group.per_node > 1:
        return in_two_levels(setup, bucket)
    sent = messages.of_codec(codec, bucket.shapes, group.ranks, knobs)
    wire = add(time(message, group, setup.machine, setup.algorithm) for message in sent)
    return with_codec(setup, 4 * bucket.elements, group.ranks, wire, messages.sent(sent, group.ranks))


def in_two_levels(setup: Setup, bucket: Bucket) -> Reduction:
    """Return a reduction by `hierarchical`. A codec with level=inter has a rank's share of the bucket."""
    group, codec, knobs = setup.group, setup.codec, setup.callbacks.get("grad_compress", {})
    inter = knobs.get("level") == "inter"
    whole = messages.of_codec(codec, bucket.shapes, group.nodes, knobs)
    across = [Message(name, size / group.per_node) for name, size in whole]
    inside = 4 * bucket.elements if inter else sum(size for _, size in whole)
    wire = two_levels(inside, group, setup.machine, across, setup.algorithm)
    sent = 2 * Message("all_gather", inside).sent(group.per_node) + messages.sent(across, group.nodes)
    coded = 4 * bucket.elements / (group.per_node if inter else 1)
    return with_codec(setup, coded, group.nodes, wire, sent)


def with_codec(setup: Setup, size: float, ranks: int, wire: Wire, sent: float) -> Reduction:
    """Return a reduction in which a codec encodes `size` bytes of float32, for the mean of `ranks` payloads."""
    own = NO_COST if setup.codec == "none" else setup.machine.codecs.get(setup.codec, NO_COST)
    decode_s = size * own.decode_s_per_byte * messages.decodes(setup.codec, ranks)
    return Reduction(size * own.encode_s_per_byte, wire, decode_s, sent)


def copying(setup: Setup) -> CodecCost:
    """Return the cost of a gradient's way into a bucket and back."""
    return setup.machine.codecs.get("none", NO_COST) if setup.copies else NO_COST
