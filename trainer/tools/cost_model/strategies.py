"""The strategies that do not reduce each bucket beside the backward pass: local_sgd, onebit_adam, shard, pipeline."""

from typing import NamedTuple

from trainer.tools.cost_model import messages
from trainer.tools.cost_model.buckets import Bucket, lay_out, shapes_of
from trainer.tools.cost_model.collectives import Group, Wire, time
from trainer.tools.cost_model.messages import Message
from trainer.tools.cost_model.passes import Passes, only
from trainer.tools.cost_model.reduction import cost, reduce
from trainer.tools.cost_model.setup import Setup
from trainer.tools.cost_model.simulate import Job, Phase, Task, simulate

OUTER_COPIES = 3  # that local_sgd makes of the weights for a synchronisation, beside the codec
ONEBIT_COPIES = 10  # that onebit_adam's unfused step makes of the parameters
CHUNKS = 2  # stages that interleaved, zero_bubble and zbv cut for each rank


class Cost(NamedTuple):
    """Seconds of a step after its passes, with the optimizer's, and the bytes sent."""

    seconds: float
    sent_bytes: float


def whole(setup: Setup) -> Bucket:
    """Return all gradients as one bucket."""
    return Bucket(shapes_of(setup), sum(setup.workload.parameters), 1.0, 0)


def copies_s(setup: Setup, count: float) -> float:
    """Return the seconds of `count` copies of all parameters."""
    own = cost(setup, "none")
    return count * setup.gradient_bytes * (own.encode_s_per_byte + own.decode_s_per_byte) / 2


def local_sgd(setup: Setup, run: Passes, codec: bool, wire: bool) -> Cost:
    """Return a step's seconds, by a simulation of two periods: fragments are sent in turn, and land `delay` later."""
    every, delay, parts = (setup.callbacks["local_sgd"][key] for key in ("every", "delay", "fragments"))
    reduction = reduce(setup, whole(setup))
    job = only(reduction, codec, wire).job()
    part = Job(tuple(Phase(phase.seconds / parts, phase.cores) for phase in job.phases))
    outer_s = copies_s(setup, OUTER_COPIES) / parts
    sends = {number * every // parts % every: number for number in range(parts)}  # step -> fragment
    tasks: list[Task] = []
    jobs: list[Job] = []
    lands: dict[int, list[int]] = {}
    for step in range(3 * every):
        sending = step % every in sends
        if sending:
            lands.setdefault(step + delay, []).append(len(jobs))
            jobs.append(part)
        starts = (len(jobs) - 1,) if sending else ()
        tasks.append(Task(run.compute_s + run.optimizer_s + outer_s * sending, starts=starts))
        tasks.append(Task(0.0, needs=tuple(lands.pop(step, ()))))
    ends = simulate(tasks, jobs, setup.machine.cores_per_rank)
    return Cost((ends[-1] - ends[-1 - 2 * every]) / every, reduction.sent_bytes / every)


def onebit_adam(setup: Setup, run: Passes, codec: bool, wire: bool) -> Cost:
    """Return a step's seconds after the warm-up: nothing hides the two exchanges of signs."""
    ranks, own, size = setup.group.ranks, cost(setup, "sign"), setup.gradient_bytes
    sent = messages.onebit_adam(shapes_of(setup))
    wires = Wire(*map(sum, zip(*(time(message, setup.group, setup.machine) for message in sent), strict=True)))
    encode = (1 + 1 / ranks) * own.encode_s_per_byte + (3 + 1 / ranks) * own.decode_s_per_byte
    seconds = run.compute_s + run.optimizer_s + wires.seconds * wire
    seconds += (size * encode + copies_s(setup, ONEBIT_COPIES)) * codec
    return Cost(seconds, messages.sent(sent, ranks))


def gathered_weights(setup: Setup) -> tuple[Wire, float]:
    """Return the time and the bytes in which the owners' weights reach all ranks, after a step of shard 1 or 2."""
    message = Message("all_gather", setup.gradient_bytes)
    return time(message, setup.group, setup.machine), message.sent(setup.group.ranks)


def fsdp(setup: Setup, run: Passes, wire: bool) -> Cost:
    """Return a step's seconds of shard's stage 3: the next unit is gathered while one computes (Zhao et al. 2023)."""
    units, machine = lay_out(setup)[::-1], setup.machine  # in the order of the forward pass
    hybrid, reshard = setup.knob("shard", "hybrid"), setup.knob("shard", "reshard")
    group = setup.group if not hybrid else Group(1, setup.group.per_node if hybrid is True else hybrid)
    copies = Group(setup.data_ranks // group.ranks, 1)

    def job(collective: str, unit: Bucket) -> Job:
        size = 4 * unit.elements
        wires = [time(Message(collective, size), group, machine)]
        if collective == "reduce_scatter" and copies.ranks > 1:
            wires.append(time(Message("all_reduce", size / group.ranks), copies, machine))
        seconds, cpu_s = map(sum, zip(*wires, strict=True))
        return Job((Phase(seconds * wire, min(1.0, cpu_s / seconds) if seconds else 0.0),))

    def one(forward_s: float, backward_s: float, reduces: bool, gathers: bool) -> float:
        count = len(units)
        jobs = [job("all_gather", unit) for unit in units] + [job("all_gather", unit) for unit in reversed(units)]
        jobs += [job("reduce_scatter", unit) for unit in reversed(units)]
        walked = [(forward_s, unit) for unit in units] + [(backward_s, unit) for unit in reversed(units)]
        needed = [gathers] * count + [gathers and reshard] * count
        tasks = [Task(0.0, starts=tuple(i for i in (0, 1) if needed[i % len(needed)] and i < len(walked)))]
        for i, (seconds, unit) in enumerate(walked):
            starts = (i + 2,) if i + 2 < len(walked) and needed[i + 2] else ()
            if i >= count and reduces:
                starts += (i + count,)
            tasks.append(Task(seconds * unit.share, needs=(i,) if needed[i] else (), starts=starts))
        tasks.append(Task(0.0, needs=tuple(range(2 * count, 3 * count)) if reduces else ()))
        return simulate(tasks, jobs, machine.cores_per_rank)[-1]

    more, rest = setup.passes - 1, run.before_s
    seconds = more * one(rest / more / 3, rest / more * 2 / 3, False, True) if more else 0.0
    seconds += one(run.forward_s, run.backward_s, True, reshard or not more)
    size, ranks = setup.gradient_bytes, group.ranks
    gathered = (2 * setup.passes if reshard else 1) * Message("all_gather", size).sent(ranks)
    sent = gathered + Message("reduce_scatter", size).sent(ranks)
    sent += Message("all_reduce", size / ranks).sent(copies.ranks)
    return Cost(seconds + run.optimizer_s / ranks, sent)


def idle(setup: Setup) -> float:
    """Return the idle seconds of a pipeline, of the seconds that a stage works.

    With p stages and m micro-batches that is (p - 1) / m for GPipe and 1F1B (Huang et al. 2018, Narayanan et al. 2019),
    and half of that with two chunks a rank (Narayanan et al. 2021, arXiv:2104.04473). ZB-H1 keeps a third (Qi et al.
    2024, arXiv:2401.10241), if the gradients of inputs and of weights take as long as the forward pass. ZBV and 2BW
    keep nothing.
    """
    schedule = setup.knob("pipeline", "schedule")
    kept = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1 / CHUNKS, "zero_bubble": 1 / 3}.get(schedule, 0.0)
    return kept * (setup.stages - 1) / setup.passes


def pipeline(setup: Setup) -> Cost:
    """Return the seconds in which a stage's messages wait in the filling of the pipeline, and the bytes of a stage.

    Other messages run beside the passes. `2 (p - 1)` messages follow each other when the pipeline fills and drains.
    """
    size, stages = setup.workload.boundary_bytes * setup.micro, setup.stages
    machine = setup.machine
    link = machine.across if machine.ranks > machine.ranks_per_node else machine.inside
    each_s = link.latency_s + size / link.bytes_per_s
    hidden = setup.knob("pipeline", "schedule") == "pipedream_2bw"
    return Cost(0.0 if hidden else 2 * (stages - 1) * each_s, 2 * setup.passes * size)
