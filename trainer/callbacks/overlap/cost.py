"""Models the step of `overlap`, in which the next forward pass hides messages too."""

from collections.abc import Sequence

from trainer.cost.buckets import DEFAULT_MIB
from trainer.cost.reduction import copying
from trainer.cost.setup import Bucket, Cost, Held, Passes, Setup
from trainer.cost.simulate import Job, Task, simulate

MIB = 1.0  # size of a bucket on gloo; on NCCL buckets have DDP's size
STEPS = 4  # simulated steps; later ones take equally long


class OverlapCost(Cost):
    """Buckets are sent in the order in which the next forward pass needs them."""

    def default_mibs(self, setup: Setup) -> Sequence[float]:
        return [DEFAULT_MIB if setup.machine.background else MIB]

    def reduce_s(self, setup: Setup, run: Passes, buckets: Sequence[Bucket], jobs: Sequence[Job]) -> float:
        """Simulate several steps; return the seconds of one. The optimizer steps each bucket when it arrives."""
        copy, count = copying(setup), len(buckets)
        total = sum(bucket.elements for bucket in buckets)
        order = sorted(range(count), key=lambda b: buckets[b].first)  # the order of need
        before = setup.passes - 1
        first_s = run.before_s / 3 / before if before else run.forward_s  # the forward pass that waits for buckets
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

    def hold(self, setup: Setup, held: Held) -> Held:
        return held._replace(buckets=0.0)
