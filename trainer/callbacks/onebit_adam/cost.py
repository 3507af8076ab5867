"""Models the step of `onebit_adam` after its warm-up."""

from trainer.comm.codecs.sign import sign_bytes
from trainer.cost.buckets import shapes_of
from trainer.cost.collectives import add, time
from trainer.cost.messages import Message, sent
from trainer.cost.reduction import copies_s
from trainer.cost.setup import NO_COST, Cost, Held, Passes, Setup, StepCost

COPIES = 10  # copies of the parameters in an unfused step


class OneBitAdamCost(Cost):
    """After the backward pass, signs of the momentum are exchanged: first of shards, then of their means."""

    def step(self, setup: Setup, run: Passes, codec: bool) -> StepCost:
        ranks, own = setup.group.ranks, setup.machine.codecs.get(self.codec_name, NO_COST)
        size = sign_bytes(shapes_of(setup))
        messages = [Message("all_to_all", size), Message("all_gather", size)]
        wire = add(time(message, setup.group, setup.machine) for message in messages)
        coded_s = (1 + 1 / ranks) * own.encode_s_per_byte + (3 + 1 / ranks) * own.decode_s_per_byte
        seconds = run.compute_s + run.optimizer_s + wire.alone_s(setup.machine.cores_per_rank)
        seconds += (setup.gradient_bytes * coded_s + copies_s(setup, COPIES)) * codec
        return StepCost(seconds, sent(messages, ranks))

    def hold(self, setup: Setup, held: Held) -> Held:
        if setup.data_ranks == 1:
            return held
        return held._replace(buckets=0.0, other=held.other + (3 + 1 / setup.data_ranks) * setup.gradient_bytes)
