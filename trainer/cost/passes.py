"""The passes of a step, and the reduction of gradients that overlaps with them."""

from collections.abc import Sequence

from trainer.cost.buckets import joined, stretches
from trainer.cost.reduction import copying, reduce, total
from trainer.cost.setup import Bucket, Passes, Setup
from trainer.cost.simulate import Job, Task, simulate


def passes(setup: Setup) -> Passes:
    """Return the slowest rank's times; a forward pass takes a third of `Workload.pass_s`."""
    workload, share, again, split = setup.workload, setup.stage_share, setup.recomputed, setup.backward_factor
    stepped = setup.stepped * setup.gradient_bytes / (4 * sum(workload.parameters))
    forward_s, start_s = workload.forward_s * share, workload.pass_s * share / 3
    backward_s = split * (workload.backward_s * share + again * forward_s)
    back_s = split * (2 + again) * start_s
    last = setup.samples - (setup.passes - 1) * setup.micro
    before = setup.samples - last
    return Passes(
        before * (forward_s + backward_s) + (setup.passes - 1) * (start_s + back_s),
        last * forward_s + start_s,
        last * backward_s + back_s,
        workload.optimizer_s * stepped,
    )


def ddp(setup: Setup, run: Passes, buckets: Sequence[Bucket], jobs: Sequence[Job]) -> float:
    """Return the seconds from the first forward pass to the last gradient if each bucket is sent once it is full."""
    copy, cores = copying(setup), setup.machine.cores_per_rank
    tasks = [Task(run.before_s + run.forward_s)]
    for number, bucket in enumerate(buckets):
        fill_s = 4 * bucket.elements * copy.encode_s_per_byte
        tasks.append(Task(run.backward_s * bucket.share + fill_s, starts=(number,)))
    back_s = sum(4 * bucket.elements * copy.decode_s_per_byte for bucket in buckets)
    tasks.append(Task(back_s, needs=tuple(range(len(buckets)))))
    return simulate(tasks, jobs, cores)[-1]


def in_step(setup: Setup, run: Passes, codec: bool) -> float:
    """Return the seconds of passes, reduction and optimizer. `codec` includes the codec's work."""
    parts = stretches(setup)
    buckets = [joined(part) for part in parts]
    jobs = [total(reduce(setup, bucket) for bucket in part).job(codec) for part in parts]
    for cost in setup.costs.values():
        if (seconds := cost.reduce_s(setup, run, buckets, jobs)) is not None:
            return seconds
    return ddp(setup, run, buckets, jobs) + run.optimizer_s
