"""The reduction of a bucket as jobs on a rank: what its codec computes, what is sent, on which levels."""

from typing import NamedTuple

from trainer.tools.cost_model import messages
from trainer.tools.cost_model.buckets import Bucket
from trainer.tools.cost_model.collectives import Group, Wire, time
from trainer.tools.cost_model.machine import CodecCost
from trainer.tools.cost_model.messages import Message, elements
from trainer.tools.cost_model.setup import Setup
from trainer.tools.cost_model.simulate import Job, Phase

NO_COST = CodecCost(0.0, 0.0)


class Reduction(NamedTuple):
    """The reduction of some gradients. Codec seconds are the processor's."""

    encode_s: float
    wire: Wire
    decode_s: float
    sent_bytes: float

    def job(self, urgency: float = 0.0) -> Job:
        cpu = self.wire.cpu_s / self.wire.seconds if self.wire.seconds else 0.0
        phases = Phase(self.encode_s, 1.0), Phase(self.wire.seconds, min(1.0, cpu)), Phase(self.decode_s, 1.0)
        return Job(phases, urgency)


def cost(setup: Setup, codec: str) -> CodecCost:
    return setup.machine.codecs.get(codec, NO_COST)


def reduce(setup: Setup, bucket: Bucket, itemsize: int = 4) -> Reduction:
    """Return the reduction of a bucket over the ranks with different data."""
    group, codec = setup.group, setup.codec
    size = itemsize * elements(bucket.shapes)
    knobs = setup.callbacks.get("grad_compress", {})
    if "hierarchical" in setup.callbacks and group.nodes > 1 and group.per_node > 1:
        return in_two_levels(setup, bucket, size)
    sent = messages.of_codec(codec, bucket.shapes, group.ranks, knobs)
    if codec == "none":
        sent = [Message("all_reduce", size)]
    wires = [time(message, group, setup.machine) for message in sent]
    own = cost(setup, codec) if codec != "none" else NO_COST
    return Reduction(
        size * own.encode_s_per_byte,
        Wire(*map(sum, zip(*wires, strict=True))),
        size * own.decode_s_per_byte * messages.decodes(codec, group.ranks),
        messages.sent(sent, group.ranks),
    )


def in_two_levels(setup: Setup, bucket: Bucket, size: float) -> Reduction:
    """Return a reduction by `hierarchical`: a codec with level=inter has a node's share, with level=all both levels."""
    group, codec, machine = setup.group, setup.codec, setup.machine
    knobs, inter = setup.callbacks.get("grad_compress", {}), setup.knob("grad_compress", "level") == "inter"
    inside, across = Group(1, group.per_node), Group(group.nodes, 1)
    part = [tuple(shape) for shape in bucket.shapes]
    own = cost(setup, codec) if codec != "none" else NO_COST
    encoded = size / group.per_node if inter else size
    between = messages.of_codec(codec, part, group.nodes, knobs)
    between = [Message(message.collective, message.size / group.per_node) for message in between]
    level = size if inter or codec == "none" else sum(m.size for m in messages.of_codec(codec, part, 1, knobs))
    within = [Message("reduce_scatter", level), Message("all_gather", level)]
    wires = [time(m, inside, machine) for m in within] + [time(m, across, machine) for m in between]
    payloads = messages.decodes(codec, group.nodes)
    return Reduction(
        encoded * own.encode_s_per_byte,
        Wire(*map(sum, zip(*wires, strict=True))),
        encoded * own.decode_s_per_byte * payloads,
        messages.sent(within, inside.ranks) + messages.sent(between, across.ranks),
    )
