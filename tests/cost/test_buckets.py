"""Buckets are those of torch's DDP; shares of the passes leave tables out."""

import pytest
import torch
import torch.distributed as dist
from support.costs import MIB, choose, machine, setup

from trainer.cost.buckets import lay_out, limits, shares

SIZES = (3 * MIB, 40_000, 7 * MIB, 900, 2 * MIB, 5 * MIB, 10, 4 * MIB, MIB, 60_000, 2 * MIB)  # elements


@pytest.mark.parametrize("mib", [None, 5, 25, 10_000])
def test_buckets_are_ddp_s(mib: float | None) -> None:
    found = lay_out(setup(machine(), choose(trainer__ddp__bucket_mib=mib), parameters=SIZES))
    bounds = [MIB, 25 * MIB] if mib is None else [int(mib * MIB)]
    tensors = [torch.empty(size, device="meta") for size in reversed(SIZES)]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, bounds, [False] * len(SIZES))
    assert [bucket.elements for bucket in found] == [sum(SIZES[::-1][i] for i in indices) for indices in expected]


def test_sizes_of_buckets() -> None:
    assert limits(setup(machine())) == [1, 25] and limits(setup(machine(), choose(trainer__ddp__bucket_mib=4))) == [4]
    assert limits(setup(machine(background=False), choose({"overlap": {}}))) == [1]
    assert limits(setup(machine(), choose({"overlap": {}}))) == [25]  # on NCCL
    both = {"overlap": {}, "bucket": {"mib": 5}}
    assert limits(setup(machine(), choose(both))) == [5, 5]  # a size that is set, in any order


def test_tables_and_vectors_take_no_share_of_the_passes() -> None:
    known = {"parameters": (8000, 10, 100, 300), "shapes": ((800, 10), (10,), (10, 10), (10, 30))}
    assert shares(setup(machine(), **known)) == [0, 0, 0.25, 0.75]
    assert shares(setup(machine(), **known, compute=(1, 0, 0, 1))) == [0.5, 0, 0, 0.5]
    assert shares(setup(machine(), parameters=(10, 30))) == [0.25, 0.75]


def test_shares_add_up() -> None:
    for callbacks in ({}, {"pipeline": {"stages": 2}}):
        found = lay_out(setup(machine(4), choose(callbacks)))
        assert sum(bucket.share for bucket in found) == pytest.approx(1)
