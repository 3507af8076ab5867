"""Each callback has a row: what a stage shards is a part of DDP's bytes, what it does not shard is whole."""

from pathlib import Path

import pytest
from support.ranks import run_ranks

from scripts.bench import sharding as bench


@pytest.mark.slow
def test_what_a_rank_holds(tmp_path: Path) -> None:
    ranks = run_ranks(3, bench.rounds_of, bench.Squares(32, 4, 4), 1, 3)
    rows = {row["callback"]: row for row in bench.table(3, ranks)}
    whole = rows["DDP"]
    assert whole["sum, of DDP"] == whole["step, of DDP"] == 1
    assert whole["optimizer state, KiB"] == 2 * whole["parameters, KiB"] == 2 * whole["gradients, KiB"]
    kinds = ("parameters, KiB", "gradients, KiB", "optimizer state, KiB")
    for way, sharded in (("shard stage=1", 1), ("shard stage=2", 2), ("shard stage=3", 3)):
        shares = [rows[way][kind] / whole[kind] for kind in kinds]
        assert all(share < 0.5 for share in shares[3 - sharded :]) and all(s == 1 for s in shares[: 3 - sharded])
    assert rows["optimizer_in_backward"]["gradients, KiB"] == 0
    assert all(row["step, of DDP"] > 0 for row in rows.values()) and rows["auto_batch"]["sum, of DDP"] == 1
