"""Predicts the seconds, bytes and memory of a training step, for any combination of callbacks and knobs.

docs/cost-model.md has the formulas, their sources, and the errors against measurements.
"""

import math
from dataclasses import replace
from statistics import NormalDist

from trainer.cost.buckets import lay_out
from trainer.cost.machine import Machine
from trainer.cost.memory import predict_memory
from trainer.cost.passes import in_step, passes
from trainer.cost.reduction import reduce
from trainer.cost.setup import Passes, Setup, StepCost
from trainer.cost.workload import Choice, Prediction, Workload
from trainer.tools.cost_model.read import read


def predict(machine: Machine, workload: Workload, choice: Choice, batch: int) -> Prediction:
    """Predict a step of `batch` samples over all ranks. `Prediction.unknown` names what is not modelled.

    Raises:
        ConfigError: A callback lacks a knob, a setting does not exist, or the ranks do not divide into stages.
    """
    setup = chosen(read(machine, workload, choice, batch))
    return with_data(setup, without_data(setup))


def without_data(setup: Setup) -> Prediction:
    """Predict a step that waits for no data."""
    run = passes(setup)
    wired = step(setup, run, codec=False)
    coded = step(setup, run, codec=True) if setup.encodes else wired
    parts = {
        "compute": run.compute_s,
        "communication": wired.seconds - run.compute_s - run.optimizer_s + slowest(setup, run),
        "codec": coded.seconds - wired.seconds,
        "optimizer": run.optimizer_s,
        "other": setup.workload.other_s,
    }
    return Prediction(sum(parts.values()), parts, wired.sent_bytes, predict_memory(setup), setup.unknown)


def with_data(setup: Setup, found: Prediction) -> Prediction:
    """Add the wait for data to the prediction of a setup that differs in `data.workers` at most."""
    parts = {**found.parts, "data": waiting_for_data(setup, passes(setup), found.step_s)}
    return replace(found, step_s=sum(parts.values()), parts=parts, unknown=setup.unknown)


def chosen(setup: Setup) -> Setup:
    """Apply what the callbacks choose when a run starts, such as the micro-batch that fits."""
    for cost in setup.costs.values():
        setup = cost.choose(setup)
    return setup


def step(setup: Setup, run: Passes, codec: bool) -> StepCost:
    """Return the seconds of passes, reduction and optimizer, and the bytes sent."""
    added = [cost.added(setup, run) for cost in setup.costs.values()]
    if setup.data_ranks == 1:
        return total([StepCost(run.compute_s + run.optimizer_s, 0.0), *added])
    for cost in setup.costs.values():
        if found := cost.step(setup, run, codec):
            return total([found, *added])
    sent = sum(reduce(setup, bucket).sent_bytes for bucket in lay_out(setup))
    return total([StepCost(in_step(setup, run, codec=codec), sent), *added])


def total(costs: list[StepCost]) -> StepCost:
    return StepCost(sum(cost.seconds for cost in costs), sum(cost.sent_bytes for cost in costs))


def slowest(setup: Setup, run: Passes) -> float:
    """Return the seconds that ranks wait for the slowest: the largest of N normal numbers (Blom 1958)."""
    ranks = setup.machine.ranks
    if ranks == 1 or not setup.workload.jitter:
        return 0.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return largest * setup.workload.jitter * run.compute_s / math.sqrt(setup.every)


def waiting_for_data(setup: Setup, run: Passes, step_s: float) -> float:
    """Return the seconds that a step waits for data.

    Workers load in parallel with the step, but on few cores loading takes time from computing.
    """
    workers, cores = setup.settings.get("data.workers", 2), setup.machine.cores_per_rank
    load_s = setup.samples * setup.workload.data_s
    if not workers:
        return load_s
    own = min(1.0, cores)
    shared_s = (run.compute_s + run.optimizer_s) * own + load_s * setup.workload.data_cpu  # of cores
    return max(0.0, load_s / workers - step_s, shared_s / cores - step_s)
