"""Meshes: who is where, and which process groups there are, in which order and with which limits."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.pipeline import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.comm.mesh import Mesh, forget_groups, line_of
from trainer.comm.ranks import Ranks
from trainer.config.options import DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

CPU = torch.device("cpu")
SHAPES: list[dict[str, int]] = [
    {"stage": 3, "data": 2}, {"replicate": 1, "shard": 6}, {"a": 1, "b": 2, "c": 3}, {"stage": 6}
]  # fmt: skip


def groups() -> list[tuple[list[int], timedelta]]:
    """The ranks and the limit of each group of this process, in the order in which they were made."""
    known = dist.distributed_c10d._world.pg_map
    return [(dist.get_process_group_ranks(group), group._get_backend(CPU).options._timeout) for group in known]  # pyright: ignore


def look(place: Place) -> list[dict[str, Any]]:
    ranks, found = Ranks(place, "cpu", "auto", 33.0), []
    for sizes in SHAPES:
        before, made = len(groups()), dist.distributed_c10d._world.group_count
        mesh = Mesh(ranks, **sizes)
        sums = {name: torch.tensor(float(ranks.rank)) for name in sizes}
        for name, value in sums.items():
            dist.all_reduce(value, group=mesh.groups[name])
        along = {name: mesh.along(name).mesh.tolist() for name in sizes}
        assert all(mesh.along(name).get_group() is mesh.groups[name] for name in sizes)
        found.append(
            {"place": mesh.place, "line": mesh.line, "along": along, "sums": {n: v.item() for n, v in sums.items()}}
            | {"lines": {name: mesh.lines(name) for name in sizes}, "groups": groups()[before:]}
            | {"made": dist.distributed_c10d._world.group_count - made, "devices": mesh.devices}
        )
        forget_groups(mesh.along(name))
        assert not mesh.devices._pg_registry
    equal = found[0].pop("devices") == Mesh(ranks, **SHAPES[0]).devices
    before, group = len(groups()), ranks.new_group()
    line = line_of(group, CPU, "shard")
    assert line.get_group() is group and line.mesh.tolist() == list(range(6)) and len(groups()) == before + 1
    forget_groups(line)
    ranks.close()
    for each in found:
        each.pop("devices", None)
    return [{**each, "equal": equal, "closed": not dist.is_initialized()} for each in found]


def test_a_rank_has_its_place_its_neighbours_and_a_group_along_each_dimension():
    for rank, found in enumerate(run_ranks(6, look)):
        pipes, replicas = [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]]
        stage, data = divmod(rank, 2)
        assert found[0]["place"] == {"stage": stage, "data": data}
        assert found[0]["lines"] == {"stage": pipes, "data": replicas}
        assert found[0]["line"] == found[0]["along"] == {"stage": pipes[data], "data": replicas[stage]}
        assert found[0]["groups"] == [(pipes[data], timedelta(seconds=33)), (replicas[stage], timedelta(seconds=33))]
        assert found[0]["sums"] == {"stage": sum(pipes[data]), "data": sum(replicas[stage])}
        assert found[1]["line"] == {"replicate": [rank], "shard": list(range(6))}
        assert found[2]["place"] == {"a": 0, "b": rank // 3, "c": rank % 3}
        a, b, c = [rank], [rank % 3, rank % 3 + 3], [[0, 1, 2], [3, 4, 5]][rank // 3]
        assert found[2]["line"] == {"a": a, "b": b, "c": c}
        assert found[3]["lines"]["stage"] == [list(range(6))] and found[3]["place"] == {"stage": rank}
        assert [each["made"] for each in found] == [2 + 3, 6 + 1, 6 + 3 + 2, 1]  # by each rank
        assert all(each["closed"] and not each["equal"] for each in found)
        assert {limit for each in found for _, limit in each["groups"]} == {timedelta(seconds=33)}


class Look(Callback):
    def on_fit_start(self, trainer) -> None:
        self.groups, self.made = groups(), dist.distributed_c10d._world.group_count


CASES: dict[str, dict[str, Callback]] = {
    "stages": {"pipeline": PipelineParallel(4)},
    "stages and replicas": {"pipeline": PipelineParallel(2)},
    "asynchronous": {"pipeline": PipelineParallel(2, "pipedream_2bw")},
    "stages and shares": {"pipeline": PipelineParallel(2), "shard": Shard(1)},
    "rows": {"shard": Shard(3)},
    "hybrid": {"shard": Shard(3, hybrid=2)},
    "one hybrid group": {"shard": Shard(3, hybrid=4)},
    "nodes": {"hierarchical": Hierarchical(2)},
    "one node": {"hierarchical": Hierarchical(4)},
}
# As before there were meshes, at commit 9466d69f: the groups of a rank, and how many all ranks have made together.
COUNTS = {
    "stages": (5, 5), "stages and replicas": (6, 8), "asynchronous": (10, 20), "stages and shares": (6, 8),
    "rows": (4, 4), "hybrid": (6, 8), "one hybrid group": (6, 9), "nodes": (6, 8), "one node": (6, 9),
}  # fmt: skip


def count(place: Place) -> dict[str, Any]:
    found = {}
    for i, (name, callbacks) in enumerate(CASES.items()):
        look = Look()
        trainer = Trainer(
            Toy(width=8, depth=4), {**callbacks, "look": look}, batch=48, accumulate=4, data=DataOptions(workers=0),
            options=Options(max_steps=1, timeout_s=33.0, run_dir=f"runs/{i}"),
            place=replace(place, store=f"{place.store}-{i}"),
        )  # fmt: skip
        trainer.fit()
        assert not dist.is_initialized()
        found[name] = {"groups": [ranks for ranks, _ in look.groups], "made": look.made}
        found[name]["limits"] = sorted({limit for _, limit in look.groups})
    return found


@pytest.mark.slow
def test_runs_have_as_many_groups_as_before_there_were_meshes(tmp_path):
    for rank in run_ranks(4, count):
        assert {name: (len(each["groups"]), each["made"]) for name, each in rank.items()} == COUNTS
        # The patient one has no limit: 30 days.
        assert all(each["limits"] == [timedelta(seconds=33), timedelta(days=30)] for each in rank.values())
