"""Models the step of `local_sgd`: fragments of the weights are sent in turn, and arrive some steps later."""

from dataclasses import dataclass

from trainer.cost.buckets import shapes_of
from trainer.cost.reduction import copies_s, reduce
from trainer.cost.setup import Bucket, Cost, Held, Passes, Setup, StepCost
from trainer.cost.simulate import Job, Task, simulate
from trainer.parallel.evenly import evenly

COPIES = 3  # copies of the weights per synchronisation, without a codec's work


@dataclass(frozen=True)
class LocalSGDCost(Cost):
    delay: int = 0
    fragments: int = 1
    held_copies: int = 2  # copies of the weights, with two or more ranks

    def parts(self, setup: Setup) -> list[Bucket]:
        sizes, shapes = setup.workload.parameters, shapes_of(setup)
        parts = evenly(sizes, self.fragments)
        return [Bucket(tuple(shapes[i] for i in part), sum(sizes[i] for i in part), 1.0, 0) for part in parts]

    def step(self, setup: Setup, run: Passes, codec: bool) -> StepCost:
        """Simulate three periods; return the cost of a step."""
        every, parts = self.every, [reduce(setup, part) for part in self.parts(setup)]
        outer_s = copies_s(setup, COPIES) / len(parts)
        sends = {n * every // len(parts) % every: part for n, part in enumerate(parts, 1)}  # by step within a period
        tasks: list[Task] = []
        jobs: list[Job] = []
        lands: dict[int, list[int]] = {}
        for step in range(3 * every):
            part = sends.get(step % every)
            starts = (len(jobs),) * (part is not None)
            if part is not None:
                lands.setdefault(step + self.delay, []).append(len(jobs))
                jobs.append(part.job(codec))
            tasks.append(Task(run.compute_s + run.optimizer_s + outer_s * len(starts), starts=starts))
            tasks.append(Task(0.0, needs=tuple(lands.pop(step, ()))))
        ends = simulate(tasks, jobs, setup.machine.cores_per_rank)
        seconds = (ends[-1] - ends[2 * every - 1]) / (2 * every)
        return StepCost(seconds, sum(part.sent_bytes for part in parts) / every)

    def hold(self, setup: Setup, held: Held) -> Held:
        if setup.data_ranks == 1:
            return held
        return held._replace(buckets=0.0, other=held.other + self.held_copies * setup.gradient_bytes)
