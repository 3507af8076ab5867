"""Each policy has a row, with fewer bytes than plain training; storages that are gone are not counted."""

import pytest
import torch

from scripts.bench import activations as bench

CPU = torch.device("cpu")


def test_each_policy_has_a_row() -> None:
    pytest.importorskip("transformers")
    rows = {row["activation_checkpoint"]: row for row in bench.measure(CPU, True, 1, 0.1)}
    assert rows.keys() == bench.ROWS.keys() - {"offload"}
    kept = {name: row["kept, of plain"] for name, row in rows.items()}
    assert kept["plain"] == 1 and kept["full"] < kept["every=2"] < 1 and kept["full"] < kept["selective"] < 1
    assert kept["budget=0.6"] <= 0.6
    flops = {name: row["FLOPs, of plain"] for name, row in rows.items()}
    assert flops["plain"] == flops["selective"] == 1 < flops["every=2"] < flops["full"] < 4 / 3


def test_what_is_gone_and_what_is_owned_is_not_counted() -> None:
    owned = torch.zeros(100)
    with bench.Live([owned], CPU) as live:
        kept, gone = owned + 1, owned * 2
        assert owned.view(10, 10).t().sum() == 0
        half = kept[:50]
        del gone, kept
        assert live.bytes() == 400  # of which `half` is a part
    assert half.numel() == 50
