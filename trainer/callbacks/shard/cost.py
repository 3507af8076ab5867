"""Models the step of `shard`: owners send weights in stages 1 and 2; units are gathered and scattered in stage 3."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.callbacks.shard.owners import assign
from trainer.cost.buckets import joined, lay_out, stretches
from trainer.cost.collectives import Group, Wire, add, of_ranks, time
from trainer.cost.messages import Message
from trainer.cost.reduction import copies_s
from trainer.cost.setup import Bucket, Cost, Held, Passes, Setup, StepCost
from trainer.cost.simulate import Job, Phase, Task, simulate

COPIES = 2  # copies of all weights per step: into messages and out of them


@dataclass(frozen=True)
class OwnersCost(Cost):
    """Stages 1 and 2: each parameter has an owner, which sends its new weights to all ranks."""

    checkpoint_parts: bool = True
    gradients: bool = False  # stage 2: only owners keep gradients

    def stepped(self, setup: Setup) -> float:
        sizes = [setup.workload.parameters[i] for i in setup.own]
        loads = [0] * setup.data_ranks
        for size, rank in zip(sizes, assign(sizes, setup.data_ranks), strict=True):
            loads[rank] += size
        return max(loads) / sum(sizes)

    def added(self, setup: Setup, run: Passes) -> StepCost:
        """Return the cost of gathering the weights. Each rank sends as much as the largest owner has."""
        if setup.data_ranks == 1:
            return StepCost(0.0, 0.0)
        message = Message("all_gather", setup.group.ranks * setup.stepped * setup.gradient_bytes)
        wire = time(message, setup.group, setup.machine)
        seconds = wire.alone_s(setup.machine.cores_per_rank) + copies_s(setup, COPIES)
        return StepCost(seconds, message.sent(setup.group.ranks))

    def hold(self, setup: Setup, held: Held) -> Held:
        if not self.gradients:
            return held
        share = setup.stepped if setup.passes == 1 else 1
        return held._replace(gradients=setup.gradient_bytes * share, buckets=0.0)


@dataclass(frozen=True)
class RowsCost(Cost):
    """Stage 3: each rank has some rows of each parameter."""

    reshard: bool = True
    hybrid: bool | int = False
    ddp_buckets: bool = False
    checkpoint_parts: bool = True

    def row_ranks(self, setup: Setup) -> int:
        return setup.data_ranks if not self.hybrid else setup.group.per_node if self.hybrid is True else self.hybrid

    def stepped(self, setup: Setup) -> float:
        return 1 / setup.row_ranks

    def step(self, setup: Setup, run: Passes, codec: bool) -> StepCost:
        """Return the cost of a step (Zhao et al. 2023, arXiv:2304.11277)."""
        before, rows, same = setup.passes - 1, *hybrid_groups(setup)
        again = [self.reshard or not before, self.reshard]
        seconds = one_pass(setup, run.forward_s, run.backward_s, again, True)
        for number, times in ((0, min(1, before)), (1, before - 1)):  # all but the first take equally long
            if times > 0:
                gathers, each_s = [self.reshard or not number, self.reshard], run.before_s / before
                seconds += times * one_pass(setup, each_s / 3, each_s * 2 / 3, gathers, False)
        size = setup.gradient_bytes
        sent = (2 * setup.passes if self.reshard else 1) * Message("all_gather", size).sent(rows.ranks)
        sent += Message("reduce_scatter", size).sent(rows.ranks)
        sent += Message("all_reduce", size / rows.ranks).sent(same.ranks)
        return StepCost(seconds + run.optimizer_s, sent)

    def hold(self, setup: Setup, held: Held) -> Held:
        """Return the bytes of a rank's rows plus two whole units. Accumulation keeps whole gradients."""
        size, ranks = setup.gradient_bytes, setup.row_ranks
        units = 4 * max(bucket.elements for bucket in lay_out(setup)) * 2
        whole = size if setup.passes > 1 else 0.0
        state = setup.optimizer_bytes / ranks
        return held._replace(parameters=size / ranks, gradients=size / ranks + whole, buckets=units, state=state)


def hybrid_groups(setup: Setup) -> tuple[Group, Group]:
    """Return the ranks that share the rows, and those that have the same rows."""
    return of_ranks(setup.row_ranks, setup.machine), Group(setup.data_ranks // setup.row_ranks, 1)


def gather(setup: Setup, units: Sequence[Bucket]) -> Wire:
    rows, _ = hybrid_groups(setup)
    return add(time(Message("all_gather", 4 * unit.elements), rows, setup.machine, library=True) for unit in units)


def scatter(setup: Setup, units: Sequence[Bucket]) -> Wire:
    """Return the messages that reduce units' gradients: a scatter over rows, and an average over equal rows."""
    (rows, same), wires = hybrid_groups(setup), []
    for size in (4 * unit.elements for unit in units):
        wires.append(time(Message("reduce_scatter", size), rows, setup.machine, library=True))
        wires.append(time(Message("all_reduce", size / rows.ranks), same, setup.machine))
    return add(wires)


def as_job(wire: Wire) -> Job:
    return Job((Phase(wire.seconds, min(1.0, wire.cpu_s / wire.seconds) if wire.seconds else 0.0),))


def one_pass(setup: Setup, forward_s: float, backward_s: float, gathers: list[bool], reduces: bool) -> float:
    """Return the seconds of a forward and a backward pass. A unit is gathered while the previous one computes.

    Without background collectives, everything runs in sequence. `gathers` states whether units are gathered before the
    forward pass, and before the backward pass.
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
