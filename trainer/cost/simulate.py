"""Simulates a rank's step: one thread that computes, one link that carries jobs, and the cores that both use.

A task is a stretch of computation. It may wait for jobs, and may start jobs at its end. The link serves one job at a
time, the most urgent first, without preemption. A task takes one core (less if the rank has less), and a phase of a job
takes part of a core. If cores are short, both slow down.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """A part of a job. Encoding and decoding take a whole core, the wire takes part of one."""

    seconds: float  # alone
    cores: float  # that it takes then


class Job(NamedTuple):
    phases: tuple[Phase, ...]
    urgency: float = 0.0  # the smallest goes first


class Task(NamedTuple):
    """A stretch of computation, which takes `seconds` if nothing else runs."""

    seconds: float
    needs: tuple[int, ...] = ()  # jobs that must have ended before it begins
    starts: tuple[int, ...] = ()  # jobs that may begin at its end


def rates(cores: float, computing: bool, demand: float) -> tuple[float, float]:
    """Return the speeds of the task and of the phase, relative to running alone.

    `demand` is the number of cores that the phase takes; 0 without a phase.
    """
    own = min(1.0, cores)
    if not computing:
        return 0.0, min(1.0, cores / demand) if demand else 1.0
    got = min(demand, max(cores - own, cores / 2))
    return min(own, cores - got) / own, got / demand if demand else 1.0


def simulate(tasks: Sequence[Task], jobs: Sequence[Job], cores: float) -> list[float]:
    """Return the time at which each task ends. Raise ValueError if a task needs a job that no earlier task starts."""
    now, ends, done = 0.0, list[float](), set[int]()
    ready: list[tuple[float, int]] = []  # jobs that may begin, the most urgent first
    serving, phases = -1, list[Phase]()  # the job on the link, and what is left of it
    number, left = 0, tasks[0].seconds if tasks else 0.0
    missing = set(tasks[0].needs) if tasks else set[int]()  # jobs that the task waits for
    while number < len(tasks):
        if serving < 0 and ready:
            _, serving = heapq.heappop(ready)
            phases = [phase for phase in jobs[serving].phases if phase.seconds > 0]
        if serving >= 0 and not phases:
            done.add(serving)
            missing.discard(serving)
            serving = -1
            continue
        computing = not missing
        if not computing and serving < 0:
            raise ValueError(f"task {number} needs jobs {tasks[number].needs}, and none is on its way")
        task_rate, phase_rate = rates(cores, computing, phases[0].cores if phases else 0.0)
        steps = [left / task_rate] if computing else []
        steps += [phases[0].seconds / phase_rate] if phases else []
        step = min(steps)
        now += step
        if phases:
            rest = phases[0].seconds - step * phase_rate
            phases[0:1] = [phases[0]._replace(seconds=rest)] if rest > 1e-12 else []
        if computing and (left := left - step * task_rate) <= 1e-12:
            for job in tasks[number].starts:
                heapq.heappush(ready, (jobs[job].urgency, job))
            ends.append(now)
            number += 1
            if number < len(tasks):
                left, missing = tasks[number].seconds, set(tasks[number].needs) - done
    return ends
