"""The step of `shard` with stage 3: units are gathered before they compute, and their gradients scattered after."""

from trainer.tools.cost_model.buckets import Bucket, lay_out
from trainer.tools.cost_model.collectives import Group, Wire, add, time
from trainer.tools.cost_model.messages import Message
from trainer.tools.cost_model.passes import Passes
from trainer.tools.cost_model.setup import Setup
from trainer.tools.cost_model.simulate import Job, Phase, Task, simulate
from trainer.tools.cost_model.strategies import Cost


def groups(setup: Setup) -> tuple[Group, Group]:
    """Return the ranks that share the rows, and those that have the same rows."""
    hybrid = setup.knob("shard", "hybrid")
    if not hybrid:
        return setup.group, Group(1, 1)
    rows = Group(1, setup.group.per_node if hybrid is True else hybrid)
    return rows, Group(setup.data_ranks // rows.ranks, 1)


def gather(setup: Setup, unit: Bucket) -> Job:
    rows, _ = groups(setup)
    return as_job([time(Message("all_gather", 4 * unit.elements), rows, setup.machine)])


def scatter(setup: Setup, unit: Bucket) -> Job:
    """Return the reduction of a unit's gradients: scattered over its rows, and averaged over equal rows."""
    (rows, same), size = groups(setup), 4 * unit.elements
    scattered = time(Message("reduce_scatter", size), rows, setup.machine)
    return as_job([scattered, time(Message("all_reduce", size / rows.ranks), same, setup.machine)])


def as_job(wires: list[Wire]) -> Job:
    wire = add(wires)
    return Job((Phase(wire.seconds, min(1.0, wire.cpu_s / wire.seconds) if wire.seconds else 0.0),))


def one_pass(setup: Setup, forward_s: float, backward_s: float, gathers: list[bool], reduces: bool) -> float:
    """Return the seconds of a forward and a backward pass. A unit is gathered while the one before it computes.

    Args:
        gathers: Whether units are gathered before the forward pass, and before the backward pass.
    """
    units = lay_out(setup)[::-1]  # in the order of the forward pass
    walked = [(forward_s, unit) for unit in units] + [(backward_s, unit) for unit in reversed(units)]
    count, jobs = len(walked), [gather(setup, unit) for _, unit in walked]
    jobs += [scatter(setup, unit) for unit in reversed(units)]
    needed = [gathers[i >= len(units)] for i in range(count)]
    tasks = [Task(0.0, starts=tuple(i for i in (0, 1) if i < count and needed[i]))]
    for i, (seconds, unit) in enumerate(walked):
        starts = (i + 2,) if i + 2 < count and needed[i + 2] else ()
        starts += (i + len(units),) if reduces and i >= len(units) else ()
        tasks.append(Task(seconds * unit.share, needs=(i,) if needed[i] else (), starts=starts))
    tasks.append(Task(0.0, needs=tuple(range(count, len(jobs))) if reduces else ()))
    return simulate(tasks, jobs, setup.machine.cores_per_rank)[-1]


def fsdp(setup: Setup, run: Passes) -> Cost:
    """Return a step's seconds (Zhao et al. 2023, arXiv:2304.11277), and the bytes that a rank sends."""
    reshard, before = setup.knob("shard", "reshard"), setup.passes - 1
    rows, same = groups(setup)
    seconds = one_pass(setup, run.forward_s, run.backward_s, [reshard or not before, reshard], True)
    for number in range(before):
        gathers = [reshard or not number, reshard]
        seconds += one_pass(setup, run.before_s / before / 3, run.before_s / before * 2 / 3, gathers, False)
    size = setup.gradient_bytes
    sent = (2 * setup.passes if reshard else 1) * Message("all_gather", size).sent(rows.ranks)
    sent += Message("reduce_scatter", size).sent(rows.ranks) + Message("all_reduce", size / rows.ranks).sent(same.ranks)
    return Cost(seconds + run.optimizer_s / rows.ranks, sent)
