"""Models a pipeline's step: the slowest stage's share, idle time, messages and activations."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.callbacks.pipeline.balance import TWICE, balance
from trainer.cost.collectives import Wire
from trainer.cost.setup import Cost, Held, Passes, Setup, StepCost

SPLIT, SPLITTING = 1.25, ("zero_bubble", "zbv")  # the factor on backward passes that split input and weight gradients
IDLE = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1 / 2, "zero_bubble": 1 / 3}  # relative to GPipe's idle time
ASYNC = "pipedream_2bw"


@dataclass(frozen=True)
class PipelineCost(Cost):
    ddp_buckets: bool = False
    checkpoint_parts: bool = True
    schedule: str = "1f1b"
    cut: tuple[int, ...] | None = None  # None: the slowest stage takes the least time
    run_ahead: int = 1

    def unknown(self, setup: Setup) -> Sequence[str]:
        if setup.workload.boundary_bytes:
            return ()
        return ["callbacks.pipeline: the bytes between two stages are not known, and are taken as 0"]

    def stage_parts(self, setup: Setup) -> Sequence[Sequence[int]]:
        if not setup.workload.parts:
            return ()
        return parts_of_ranks(setup.workload.parts, self.stages, self.schedule, self.cut)

    def added(self, setup: Setup, run: Passes) -> StepCost:
        idle_s = idle(setup, self.schedule) * run.compute_s
        messages = exchanged(setup, self.schedule)
        return StepCost(messages.seconds + idle_s, messages.sent_bytes)

    def in_flight(self, setup: Setup) -> float:
        if self.schedule == "gpipe":
            return setup.passes
        return self.run_ahead * (self.stages - 1) + 1 if self.schedule == ASYNC else min(setup.passes, self.stages)

    def hold(self, setup: Setup, held: Held) -> Held:
        """Return the bytes that a rank holds. 2BW keeps two versions of the weights, each with gradients."""
        if self.schedule != ASYNC:
            return held
        size = setup.gradient_bytes
        return held._replace(parameters=2 * size, gradients=2 * size, buckets=0.0, state=setup.optimizer_bytes)


def idle(setup: Setup, schedule: str) -> float:
    """Return a pipeline's idle time as a fraction of the time that a stage computes.

    With p stages and m micro-batches it is (p - 1) / m for GPipe and 1F1B (Huang et al. 2018, Narayanan et al. 2019).
    Two chunks per rank halve it (Narayanan et al. 2021, arXiv:2104.04473). ZB-H1 leaves a third (Qi et al. 2024,
    arXiv:2401.10241), if input gradients and weight gradients each take as long as the forward pass. ZBV and 2BW leave
    none. With unequal stages, the slowest waits once for the others.
    """
    return IDLE.get(schedule, 0.0) * (1 / setup.stage_share - 1) / setup.passes


def exchanged(setup: Setup, schedule: str) -> StepCost:
    """Return the seconds that messages add while the pipeline fills and drains, and the bytes that a stage sends.

    These are `2 (p - 1)` sequential messages; all others overlap with the passes. At the end of a step the first stage
    and the last exchange the gradients of tied parameters; ZBV has both on one rank.
    """
    machine, stages = setup.machine, setup.stages
    size, tied = setup.workload.boundary_bytes * setup.micro, setup.workload.tied_bytes * (schedule != "zbv")
    link = machine.across if machine.ranks > machine.ranks_per_node else machine.inside
    each_s = link.latency_s + size / link.bytes_per_s
    exchange = Wire(link.latency_s + tied / link.bytes_per_s, 2 * tied * link.cpu_s_per_byte) if tied else Wire()
    seconds = (0.0 if schedule == ASYNC else 2 * (stages - 1) * each_s) + exchange.alone_s(machine.cores_per_rank)
    return StepCost(seconds, 2 * setup.passes * size + tied)


@functools.lru_cache(maxsize=64)  # a search asks for the same few again and again
def parts_of_ranks(
    parts: tuple[float, ...], ranks: int, schedule: str, cut: tuple[int, ...] | None
) -> Sequence[Sequence[int]]:
    """Return the parts on each rank, cut as `pipeline` does; nothing if there are fewer blocks than stages.

    `parts` are shares of the passes: before the blocks, per block, and after them. Rank s modulo `ranks` runs stage s.
    With ZBV, the second stages are assigned in reverse order.
    """
    stages, blocks = ranks * (2 if schedule in TWICE else 1), parts[1:-1]
    if len(blocks) < stages:
        return ()
    starts = (0, *cut) if cut else balance(blocks, [1.0] * stages, parts[0], parts[-1], lambda *_: True)
    assert starts is not None
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage, (start, stop) in enumerate(zip(starts, (*starts[1:], len(blocks)), strict=True)):
        rank = stages - 1 - stage if schedule == "zbv" and stage >= ranks else stage % ranks
        found[rank] += range(start + (stage > 0), stop + 1 + (stage == stages - 1))
    return found
