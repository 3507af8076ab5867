"""The step of `shard` with stage 3: units are gathered before they compute, and their gradients scattered after."""

import itertools
from collections.abc import Sequence

from trainer.cost.buckets import Bucket, joined, stretches
from trainer.cost.collectives import Group, Wire, add, time
from trainer.cost.messages import Message
from trainer.cost.passes import Passes
from trainer.cost.setup import Setup
from trainer.cost.simulate import Job, Phase, Task, simulate
from trainer.tools.cost_model.strategies import Cost


def groups(setup: Setup) -> tuple[Group, Group]:
    """Return the ranks that share the rows, and those that have the same rows."""
    if not setup.knob("shard", "hybrid"):
        return setup.group, Group(1, 1)
    return Group(1, setup.row_ranks), Group(setup.data_ranks // setup.row_ranks, 1)


def gather(setup: Setup, units: Sequence[Bucket]) -> Wire:
    rows, _ = groups(setup)
    return add(time(Message("all_gather", 4 * unit.elements), rows, setup.machine, library=True) for unit in units)


def scatter(setup: Setup, units: Sequence[Bucket]) -> Wire:
    """Return the reduction of the gradients of units: scattered over their rows, and averaged over equal rows."""
    (rows, same), wires = groups(setup), []
    for size in (4 * unit.elements for unit in units):
        wires.append(time(Message("reduce_scatter", size), rows, setup.machine, library=True))
        wires.append(time(Message("all_reduce", size / rows.ranks), same, setup.machine))
    return add(wires)


def as_job(wire: Wire) -> Job:
    return Job((Phase(wire.seconds, min(1.0, wire.cpu_s / wire.seconds) if wire.seconds else 0.0),))


def one_pass(setup: Setup, forward_s: float, backward_s: float, gathers: list[bool], reduces: bool) -> float:
    """Return the seconds of a forward and a backward pass. A unit is gathered while the one before it computes.

    Without collectives in the background, everything comes one after another.

    Args:
        gathers: Whether units are gathered before the forward pass, and before the backward pass.
    """
    units = stretches(setup)[::-1]  # in the order of the forward pass
    walked = [(forward_s, unit) for unit in units] + [(backward_s, unit) for unit in reversed(units)]
    count, wires = len(walked), [gather(setup, unit) for _, unit in walked]
    wires += [scatter(setup, unit) for unit in reversed(units)]
    needed = [gathers[i >= len(units)] for i in range(count)]
    cores = setup.machine.cores_per_rank
    if not setup.machine.background:
        called = itertools.compress(wires, [*needed, *[reduces] * len(units)])
        return forward_s + backward_s + sum(wire.alone_s(cores) for wire in called)
    jobs = [as_job(wire) for wire in wires]
    tasks = [Task(0.0, starts=tuple(i for i in (0, 1) if i < count and needed[i]))]
    for i, (seconds, unit) in enumerate(walked):
        starts = (i + 2,) if i + 2 < count and needed[i + 2] else ()
        starts += (i + len(units),) if reduces and i >= len(units) else ()
        tasks.append(Task(seconds * joined(unit).share, needs=(i,) if needed[i] else (), starts=starts))
    tasks.append(Task(0.0, needs=tuple(range(count, len(jobs))) if reduces else ()))
    return simulate(tasks, jobs, cores)[-1]


def fsdp(setup: Setup, run: Passes) -> Cost:
    """Return a step's seconds (Zhao et al. 2023, arXiv:2304.11277), and the bytes that a rank sends."""
    reshard, before = setup.knob("shard", "reshard"), setup.passes - 1
    rows, same = groups(setup)
    seconds = one_pass(setup, run.forward_s, run.backward_s, [reshard or not before, reshard], True)
    for number, times in ((0, min(1, before)), (1, before - 1)):  # all but the first are alike
        if times > 0:
            gathers, each_s = [reshard or not number, reshard], run.before_s / before
            seconds += times * one_pass(setup, each_s / 3, each_s * 2 / 3, gathers, False)
    size = setup.gradient_bytes
    sent = (2 * setup.passes if reshard else 1) * Message("all_gather", size).sent(rows.ranks)
    sent += Message("reduce_scatter", size).sent(rows.ranks) + Message("all_reduce", size / rows.ranks).sent(same.ranks)
    return Cost(seconds + run.optimizer_s, sent)
