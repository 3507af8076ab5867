"""The passes of a step, and how the reduction of gradients lies beside them: DDP's way, and that of overlap."""

from collections.abc import Sequence
from typing import NamedTuple

from trainer.cost.buckets import Bucket, joined, stretches
from trainer.cost.reduction import copying, reduce, total
from trainer.cost.setup import Setup
from trainer.cost.simulate import Job, Task, simulate

STEPS = 4  # after so many, overlap's steps are alike
SPLIT = 1.25  # of a backward pass whose gradients of inputs come before those of weights: docs/cost-model.md
RECOMPUTED = {"full": 1.0, "selective": 0.1, "offload": 0.0}  # of a block; selective: norms and activations


class Passes(NamedTuple):
    """Seconds of the fullest rank's passes and optimizer in a step without communication."""

    before_s: float  # all but the last micro-batch
    forward_s: float  # of the last micro-batch
    backward_s: float  # of the last micro-batch
    optimizer_s: float

    @property
    def compute_s(self) -> float:
        return self.before_s + self.forward_s + self.backward_s


def recomputed(setup: Setup) -> float:
    """Return the share of the forward pass that runs again in the backward pass: of its blocks, if they are known."""
    own, parts = setup.callbacks.get("activation_checkpoint"), setup.workload.parts
    if own is None:
        return 0.0
    share = RECOMPUTED[own["policy"]] / own["every"] if own["budget"] is None else 1.0 - own["budget"]
    return share * sum(parts[1:-1]) / sum(parts) if parts else share


def splitting(setup: Setup) -> float:
    """Return how many times as long a backward pass takes if a pipeline splits it."""
    return SPLIT if setup.knob("pipeline", "schedule") in ("zero_bubble", "zbv") else 1.0


def passes(setup: Setup) -> Passes:
    """Return the seconds of the passes of the slowest rank; a forward pass has a third of `Workload.pass_s`."""
    workload, share, again, split = setup.workload, setup.stage_share, recomputed(setup), splitting(setup)
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
    """Return the seconds from the first forward pass to the last gradient, with each bucket sent when it is full."""
    copy, cores = copying(setup), setup.machine.cores_per_rank
    tasks = [Task(run.before_s + run.forward_s)]
    for number, bucket in enumerate(buckets):
        fill_s = 4 * bucket.elements * copy.encode_s_per_byte
        tasks.append(Task(run.backward_s * bucket.share + fill_s, starts=(number,)))
    back_s = sum(4 * bucket.elements * copy.decode_s_per_byte for bucket in buckets)
    tasks.append(Task(back_s, needs=tuple(range(len(buckets)))))
    return simulate(tasks, jobs, cores)[-1]


def overlap(setup: Setup, run: Passes, buckets: Sequence[Bucket], jobs: Sequence[Job]) -> float:
    """Return the seconds of a step if the next forward pass hides messages too; the optimizer's are in it."""
    copy, count = copying(setup), len(buckets)
    total = sum(bucket.elements for bucket in buckets)
    order = sorted(range(count), key=lambda b: buckets[b].first)  # of need
    before = setup.passes - 1
    first_s = run.before_s / 3 / before if before else run.forward_s  # the first forward pass, which waits for buckets
    tasks: list[Task] = []
    for step in range(STEPS):
        for b in order:
            needs = ((step - 1) * count + b,) if step else ()
            tasks.append(Task(run.optimizer_s * buckets[b].elements / total, needs=needs))
            tasks.append(Task(first_s * buckets[b].share))
        tasks.append(Task(run.before_s + run.forward_s - first_s))
        for b, bucket in enumerate(buckets):
            fill_s = 4 * bucket.elements * copy.encode_s_per_byte
            tasks.append(Task(run.backward_s * bucket.share + fill_s, starts=(step * count + b,)))
    queue = [job._replace(urgency=buckets[b].first) for _ in range(STEPS) for b, job in enumerate(jobs)]
    ends = simulate(tasks, queue, setup.machine.cores_per_rank)
    each = len(tasks) // STEPS
    return ends[-1] - ends[-1 - each]


def in_step(setup: Setup, run: Passes, codec: bool) -> float:
    """Return the seconds of passes, reduction and optimizer, with or without the codec's work."""
    parts = stretches(setup)
    buckets = [joined(part) for part in parts]
    jobs = [total(reduce(setup, bucket) for bucket in part).job(codec) for part in parts]
    if "overlap" in setup.callbacks:
        return overlap(setup, run, buckets, jobs)
    return ddp(setup, run, buckets, jobs) + run.optimizer_s
