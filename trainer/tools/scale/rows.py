"""Predicts the rows of the table: speed, memory, checkpoints and failures of each strategy on each number of nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.checkpoint.interval import daly, lost, prior_s
from trainer.cost.setup import Cost
from trainer.cost.workload import Choice, Prediction, Workload
from trainer.tools.cost_model.predict import predict
from trainer.tools.cost_model.read import costs_of
from trainer.tools.scale.machines import Cluster
from trainer.tools.scale.options import VIEW, Way

GRADIENT = 4  # bytes of a parameter, which no checkpoint has
STALL = 0.1  # seconds of any checkpoint in addition to its copy to the host; a choice
RESTART = 300.0  # from a failure to the next step: notice it, start 8 ranks a node, load; a choice


@dataclass(frozen=True)
class Row:
    """A strategy on some nodes. Rates are totals over ranks; shares are between 0 and 1."""

    nodes: int
    ranks: int
    way: str
    batch: int
    step_s: float
    samples_per_s: float
    efficiency: float  # samples a second and rank, of one rank's alone
    exposed: float  # share of the step in which ranks wait for communication
    memory_gib: float
    fits: bool
    checkpoint_s: float  # until it is written
    stall_s: float
    mtbf_h: float
    interval_s: float
    lost: float  # share that checkpoints, restarts and repeated work take
    net_samples_per_s: float
    unknown: tuple[str, ...]


def alone(cluster: Cluster, workload: Workload, per_rank: int, passes: int) -> Prediction:
    """Return the prediction of one rank without communication, with the samples of a step in `passes` parts."""
    one = replace(cluster.machine, ranks=1, ranks_per_node=1)
    return predict(one, workload, Choice({}, {"accumulate": passes}), per_rank)


def own_way(config: Mapping[str, Any]) -> dict[str, Way]:
    """Return the run's own callbacks as the strategy `config`; {} if they only measure and show."""
    allow = tuple(config["trainer"]["allow_targets"])
    costs = costs_of(config["callbacks"], allow)
    callbacks = {name: node for name, node in config["callbacks"].items() if costs[name] != Cost()}
    settings = {f"trainer.ddp.{key}": value for key, value in config["trainer"]["ddp"].items() if value is not None}
    settings = {key: value for key, value in settings.items() if key.endswith(("_mib", "_view"))}
    return {"config": Way(callbacks, {**VIEW, **settings}, allow)} if callbacks else {}


def row(
    cluster: Cluster, workload: Workload, named: tuple[str, Way], nodes: int, batch: int, micro: int | None,
    frozen_bytes: float = 0.0,
) -> Row:  # fmt: skip
    """Predict one row. `batch` is over all ranks; each rank holds `frozen_bytes` in addition to the workload."""
    (name, way), machine = named, cluster.of(nodes)
    choice = Choice(way.callbacks, {**way.settings, **({"micro_batch": micro} if micro else {})}, way.allow)
    parts = any(cost and cost.checkpoint_parts for cost in costs_of(way.callbacks, way.allow).values())
    found = predict(machine, workload, choice, batch)
    per_rank = -(-batch // machine.ranks)
    single = alone(cluster, workload, per_rank, max(1, per_rank // (micro or per_rank)))
    rate = batch / found.step_s
    size = workload.state_bytes - GRADIENT * sum(workload.parameters) + frozen_bytes
    memory = found.memory_bytes + frozen_bytes
    written_s = size / (machine.disk_bytes_per_s * (nodes if parts else 1))
    stall_s = STALL + size / (machine.ranks if parts else 1) / cluster.host_bytes_per_s
    mtbf_s = prior_s(machine.ranks)
    interval_s = max(daly(stall_s, mtbf_s), written_s)
    share = lost(interval_s, stall_s, RESTART + written_s, mtbf_s)
    return Row(
        nodes, machine.ranks, name, batch, found.step_s, rate, rate / machine.ranks / (per_rank / single.step_s),
        found.parts["communication"] / found.step_s, memory / 2**30,
        machine.memory_bytes is None or memory <= machine.memory_bytes,
        written_s, stall_s, mtbf_s / 3600, interval_s, share, rate * (1 - share), found.unknown,
    )  # fmt: skip


def rows(
    cluster: Cluster, workload: Workload, nodes: Iterable[int], ways: Mapping[str, Way], batch: int | None,
    per_rank: int, micro: int | None, frozen_bytes: float = 0.0,
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """Predict all rows, and list those left out with the reason.

    `batch` is over all ranks, on any number of nodes; None: `per_rank` samples on each rank.
    """
    made, left_out = [], []
    for count in nodes:
        ranks = cluster.of(count).ranks
        for name, way in ways.items():
            stages = max((cost.stages for cost in costs_of(way.callbacks, way.allow).values() if cost), default=1)
            if ranks % stages:
                left_out.append(f"{name} on {count} node(s): {stages} stages do not divide {ranks} ranks")
            elif batch is not None and batch * stages < ranks:
                left_out.append(f"{name} on {count} node(s): the batch of {batch} is smaller than {ranks} ranks")
            else:
                made.append(row(cluster, workload, (name, way), count, batch or per_rank * ranks, micro, frozen_bytes))
    return made, left_out
