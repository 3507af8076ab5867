"""The strategies that do not reduce each bucket beside the backward pass: local_sgd, onebit_adam, shard, pipeline."""

from typing import NamedTuple

from trainer.cost import messages
from trainer.cost.buckets import fragments, shapes_of
from trainer.cost.collectives import Wire, add, time
from trainer.cost.messages import Message
from trainer.cost.passes import Passes
from trainer.cost.reduction import NO_COST, copying, reduce
from trainer.cost.setup import Setup
from trainer.cost.simulate import Job, Task, simulate

OUTER_COPIES = 3  # that local_sgd makes of the weights for a synchronisation, beside the codec
ONEBIT_COPIES = 10  # that onebit_adam's unfused step makes of the parameters
OWNER_COPIES = 2  # that owners make of all weights: into messages and out of them


class Cost(NamedTuple):
    """Seconds of a step, from the first forward pass to the optimizer's end, and the bytes that a rank sends."""

    seconds: float
    sent_bytes: float


def copies_s(setup: Setup, count: float) -> float:
    """Return the seconds of `count` copies of all parameters."""
    own = copying(setup)
    return count * setup.gradient_bytes * (own.encode_s_per_byte + own.decode_s_per_byte) / 2


def local_sgd(setup: Setup, run: Passes, codec: bool) -> Cost:
    """Return a step's seconds, by a simulation of three periods: fragments are sent in turn, and land `delay` later."""
    every, delay, count = (setup.callbacks["local_sgd"][key] for key in ("every", "delay", "fragments"))
    parts = [reduce(setup, part) for part in fragments(setup, count)]
    outer_s = copies_s(setup, OUTER_COPIES) / len(parts)
    sends = {number * every // len(parts) % every: part for number, part in enumerate(parts, 1)}  # steps of a period
    tasks: list[Task] = []
    jobs: list[Job] = []
    lands: dict[int, list[int]] = {}
    for step in range(3 * every):
        part = sends.get(step % every)
        starts = (len(jobs),) * (part is not None)
        if part is not None:
            lands.setdefault(step + delay, []).append(len(jobs))
            jobs.append(part.job(codec))
        tasks.append(Task(run.compute_s + run.optimizer_s + outer_s * len(starts), starts=starts))
        tasks.append(Task(0.0, needs=tuple(lands.pop(step, ()))))
    ends = simulate(tasks, jobs, setup.machine.cores_per_rank)
    return Cost((ends[-1] - ends[2 * every - 1]) / (2 * every), sum(part.sent_bytes for part in parts) / every)


def onebit_adam(setup: Setup, run: Passes, codec: bool) -> Cost:
    """Return a step's seconds after the warm-up: nothing hides the two exchanges of signs."""
    ranks, own = setup.group.ranks, setup.machine.codecs.get("sign", NO_COST)
    sent = messages.onebit_adam(shapes_of(setup))
    wire = add(time(message, setup.group, setup.machine) for message in sent)
    encode = (1 + 1 / ranks) * own.encode_s_per_byte + (3 + 1 / ranks) * own.decode_s_per_byte
    seconds = run.compute_s + run.optimizer_s + wire.alone_s(setup.machine.cores_per_rank)
    seconds += (setup.gradient_bytes * encode + copies_s(setup, ONEBIT_COPIES)) * codec
    return Cost(seconds, messages.sent(sent, ranks))


def gathered_weights(setup: Setup) -> Cost:
    """Return the seconds and bytes in which the owners' weights reach all ranks, after a step of shard 1 or 2.

    Each rank sends as much as the fullest owner has.
    """
    message = Message("all_gather", setup.group.ranks * setup.stepped * setup.gradient_bytes)
    wire = time(message, setup.group, setup.machine)
    seconds = wire.alone_s(setup.machine.cores_per_rank) + copies_s(setup, OWNER_COPIES)
    return Cost(seconds, message.sent(setup.group.ranks))


def idle(setup: Setup) -> float:
    """Return the idle seconds of a pipeline, of the seconds that a stage works.

    With p stages and m micro-batches it is (p - 1) / m for GPipe and 1F1B (Huang et al. 2018, Narayanan et al. 2019).
    Two chunks a rank halve it (Narayanan et al. 2021, arXiv:2104.04473). ZB-H1 keeps a third (Qi et al.
    2024, arXiv:2401.10241), if the gradients of inputs and of weights take as long as the forward pass. ZBV and 2BW
    keep nothing. The slowest of unequal stages waits once for the others.
    """
    schedule = setup.knob("pipeline", "schedule")
    kept = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1 / 2, "zero_bubble": 1 / 3}.get(schedule, 0.0)
    return kept * (1 / setup.stage_share - 1) / setup.passes


def pipeline(setup: Setup) -> Cost:
    """Return the seconds in which a stage's messages wait in the filling of the pipeline, and the bytes of a stage.

    Other messages run beside the passes. `2 (p - 1)` messages follow each other when the pipeline fills and drains. At
    the end of a step the first stage and the last exchange the gradients of tied parameters; ZBV has both on a rank.
    """
    machine, stages, schedule = setup.machine, setup.stages, setup.knob("pipeline", "schedule")
    size, tied = setup.workload.boundary_bytes * setup.micro, setup.workload.tied_bytes * (schedule != "zbv")
    link = machine.across if machine.ranks > machine.ranks_per_node else machine.inside
    each_s = link.latency_s + size / link.bytes_per_s
    hidden = schedule == "pipedream_2bw"
    exchange = Wire(link.latency_s + tied / link.bytes_per_s, 2 * tied * link.cpu_s_per_byte) if tied else Wire()
    seconds = (0.0 if hidden else 2 * (stages - 1) * each_s) + exchange.alone_s(machine.cores_per_rank)
    return Cost(seconds, 2 * setup.passes * size + tied)
