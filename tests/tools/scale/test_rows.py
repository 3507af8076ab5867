"""Rows by hand and by their limits: one device, many, and what scale takes away."""

from dataclasses import replace
from typing import Any

import pytest
from support.costs import WORKLOAD, machine

from trainer.checkpoint.interval import daly, prior_s
from trainer.cost.machine import Link
from trainer.tools.scale.machines import Cluster
from trainer.tools.scale.options import WAYS
from trainer.tools.scale.rows import Row, own_way, row, rows

NODE = machine(8, 8, Link(1e-5, 1e9, 0.0), 8.0, inside=Link(1e-6, 1e11, 0.0), memory_bytes=2e8)
CLUSTER = Cluster(NODE, {}, 0.0, 1e10, "a test")
P = sum(WORKLOAD.parameters)


def made(way: str, nodes: int, **changes: Any) -> Row:
    return row(CLUSTER, replace(WORKLOAD, **changes), (way, WAYS[way]), nodes, 32 * nodes, 2)


def test_a_node_with_a_fast_link_is_as_fast_as_its_ranks() -> None:
    found = made("ring", 1)
    assert found.efficiency == pytest.approx(1, abs=0.01) and found.samples_per_s == pytest.approx(32 / found.step_s)
    assert found.ranks == 8 and found.batch == 32 and found.fits


def test_a_flat_ring_slows_down_with_its_ranks_and_a_tree_does_not() -> None:
    ring, tree, levels = ([made(way, nodes) for nodes in (2, 64, 4096)] for way in ("ring", "tree", "hierarchical"))
    assert ring[0].efficiency > ring[1].efficiency > ring[2].efficiency
    assert tree[2].efficiency > levels[2].efficiency > ring[2].efficiency and tree[2].efficiency > 0.95
    assert ring[2].exposed > 0.1 and tree[2].exposed < 0.05


def test_shards_share_the_memory() -> None:
    whole, sharded = (row(CLUSTER, WORKLOAD, (way, WAYS[way]), 8, 256, None) for way in ("ring", "shard-3"))
    assert sharded.memory_gib < whole.memory_gib / 2
    small = replace(CLUSTER, machine=replace(NODE, memory_bytes=4e7))
    assert not row(small, WORKLOAD, ("ring", WAYS["ring"]), 1, 32, 2).fits


def test_checkpoints_follow_daly() -> None:
    found, sharded = made("ring", 4), made("shard-3", 4)
    assert found.checkpoint_s == pytest.approx(12 * P / 1e9) and sharded.checkpoint_s == pytest.approx(12 * P / 4e9)
    assert found.interval_s == pytest.approx(daly(found.stall_s, prior_s(32))) and found.mtbf_h == prior_s(32) / 3600
    assert 0 < found.lost < 0.01 and found.net_samples_per_s == pytest.approx(found.samples_per_s * (1 - found.lost))


def test_frozen_parameters_are_on_each_rank_and_in_each_checkpoint() -> None:
    of = (("shard-3", WAYS["shard-3"]), 4, 128, 2)
    plain, frozen = row(CLUSTER, WORKLOAD, *of), row(CLUSTER, WORKLOAD, *of, frozen_bytes=2**30)
    assert frozen.memory_gib == pytest.approx(plain.memory_gib + 1) and plain.fits and not frozen.fits
    assert frozen.checkpoint_s == pytest.approx(plain.checkpoint_s + 2**30 / 4e9) and frozen.stall_s > plain.stall_s


def test_failures_take_more_of_more_nodes() -> None:
    lost = [made("ring", nodes).lost for nodes in (1, 64, 4096)]
    assert lost[0] < lost[1] < lost[2]


def test_what_does_not_divide_is_left_out_and_said() -> None:
    odd = Cluster(machine(3, 3), {}, 0.0, 1e10, "three ranks")
    two = {name: WAYS[name] for name in ("ring", "pipeline-4")}
    found, left_out = rows(odd, WORKLOAD, (1, 4), two, None, 2, None)
    assert [(each.way, each.nodes) for each in found] == [("ring", 1), ("ring", 4), ("pipeline-4", 4)]
    assert left_out == ["pipeline-4 on 1 node(s): 4 stages do not divide 3 ranks"]
    _, left_out = rows(CLUSTER, WORKLOAD, (1, 64), WAYS, 64, 2, None)
    assert len(left_out) == len(WAYS) and "the batch of 64 is smaller than 512 ranks" in left_out[0]


def test_the_run_s_own_callbacks_are_a_way() -> None:
    ddp = {"bucket_mib": 4.0, "static_graph": False, "gradient_as_bucket_view": None}
    monitor = {"_target_": "trainer.loggers.progress.Progress"}
    nodes: dict[str, Any] = {
        "progress": monitor,
        "local_sgd": {"_target_": "trainer.callbacks.local_sgd.callback.LocalSGD", "every": 4},
    }
    own = own_way({"callbacks": nodes, "trainer": {"ddp": ddp, "allow_targets": []}})["config"]
    assert own.callbacks == {"local_sgd": nodes["local_sgd"]} and own.settings["trainer.ddp.bucket_mib"] == 4.0
    found, _ = rows(CLUSTER, WORKLOAD, (4,), {"config": own, "ring": WAYS["ring"]}, None, 2, None)
    assert found[0].way == "config" and found[0].exposed < found[1].exposed and found[0].unknown == ()
    assert own_way({"callbacks": {"progress": monitor}, "trainer": {"ddp": ddp, "allow_targets": []}}) == {}
