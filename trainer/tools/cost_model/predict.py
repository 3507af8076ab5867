"""Predicts the seconds, bytes and memory of a training step, for any combination of callbacks and knobs.

docs/cost-model.md has the formulas, their sources, and the errors against measurements.
"""

import math
from dataclasses import replace
from statistics import NormalDist

from trainer.cost.buckets import lay_out
from trainer.tools.cost_model.fsdp import fsdp
from trainer.cost.machine import Machine
from trainer.cost.memory import predict_memory
from trainer.cost.passes import Passes, in_step, passes
from trainer.cost.reduction import reduce
from trainer.cost.setup import Setup, read
from trainer.tools.cost_model.strategies import Cost, gathered_weights, idle, local_sgd, onebit_adam, pipeline
from trainer.cost.workload import Choice, Prediction, Workload


def predict(machine: Machine, workload: Workload, choice: Choice, batch: int) -> Prediction:
    """Predict a step of `batch` samples over all ranks.

    `Prediction.unknown` names what was chosen and is not modelled.

    Raises:
        ConfigError: A callback lacks a knob, a setting does not exist, or the ranks do not divide into stages.
    """
    setup = fit_memory(read(machine, workload, choice, batch))
    return with_data(setup, without_data(setup))


def without_data(setup: Setup) -> Prediction:
    """Predict a step that waits for no data."""
    run = passes(setup)
    wired = step(setup, run, codec=False)
    coded = step(setup, run, codec=True) if encodes(setup) else wired
    bubble_s = idle(setup) * run.compute_s if setup.stages > 1 else 0.0
    slow_s = slowest(setup, run)
    parts = {
        "compute": run.compute_s,
        "communication": wired.seconds - run.compute_s - run.optimizer_s + bubble_s + slow_s,
        "codec": coded.seconds - wired.seconds,
        "optimizer": run.optimizer_s,
        "other": setup.workload.other_s,
    }
    return Prediction(sum(parts.values()), parts, wired.sent_bytes, predict_memory(setup), setup.unknown)


def with_data(setup: Setup, found: Prediction) -> Prediction:
    """Add the wait for data to the prediction of a setup that differs in `data.workers` at most."""
    parts = {**found.parts, "data": waiting_for_data(setup, passes(setup), found.step_s)}
    return replace(found, step_s=sum(parts.values()), parts=parts, unknown=setup.unknown)


def encodes(setup: Setup) -> bool:
    """Return whether a codec works beside the wire."""
    return setup.codec != "none" or "onebit_adam" in setup.callbacks


def fit_memory(setup: Setup) -> Setup:
    """Return the setup with the largest micro-batch that fits, if `auto_batch` looks for it."""
    limit = setup.machine.memory_bytes
    if "auto_batch" not in setup.callbacks or limit is None:
        return setup
    most = min(setup.knob("auto_batch", "max_micro") or setup.samples, setup.samples)
    tries = [replace(setup, settings={**setup.settings, "micro_batch": micro}) for micro in range(most, 0, -1)]
    return next((each for each in tries if predict_memory(each) <= limit), tries[-1])


def step(setup: Setup, run: Passes, codec: bool) -> Cost:
    """Return the seconds of passes, reduction and optimizer, and the bytes sent."""
    extra = pipeline(setup) if setup.stages > 1 else Cost(0.0, 0.0)
    if setup.data_ranks == 1:
        return Cost(run.compute_s + run.optimizer_s + extra.seconds, extra.sent_bytes)
    if "local_sgd" in setup.callbacks:
        return local_sgd(setup, run, codec)
    if "onebit_adam" in setup.callbacks:
        return onebit_adam(setup, run, codec)
    stage = setup.knob("shard", "stage", 0)
    if stage == 3:
        return fsdp(setup, run)
    sent = sum(reduce(setup, bucket).sent_bytes for bucket in lay_out(setup))
    seconds = in_step(setup, run, codec=codec)
    weights = gathered_weights(setup) if stage else Cost(0.0, 0.0)
    return Cost(seconds + weights.seconds + extra.seconds, sent + weights.sent_bytes + extra.sent_bytes)


def slowest(setup: Setup, run: Passes) -> float:
    """Return the seconds for which ranks wait for the slowest: the largest of N normal numbers (Blom 1958)."""
    ranks, every = setup.machine.ranks, setup.knob("local_sgd", "every", 1)
    if ranks == 1 or not setup.workload.jitter:
        return 0.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return largest * setup.workload.jitter * run.compute_s / math.sqrt(every)


def waiting_for_data(setup: Setup, run: Passes, step_s: float) -> float:
    """Return the seconds of a step that wait for data.

    Workers load beside the step. On few cores, loading takes time that computing needs.
    """
    workers, cores = setup.settings.get("data.workers", 2), setup.machine.cores_per_rank
    load_s = setup.samples * setup.workload.data_s
    if not workers:
        return load_s
    own = min(1.0, cores)
    shared_s = (run.compute_s + run.optimizer_s) * own + load_s * setup.workload.data_cpu  # of cores
    return max(0.0, load_s / workers - step_s, shared_s / cores - step_s)
