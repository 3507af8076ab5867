"""Seconds and bytes of a bucket's reduction by hand: a megabyte a second between nodes."""

import pytest
from support.costs import CODECS, MIB, choose, machine, setup

from trainer.cost.buckets import lay_out
from trainer.cost.machine import CodecCost
from trainer.cost.reduction import copying, reduce
from trainer.cost.simulate import Phase

ONE = {"trainer__ddp__bucket_mib": 10_000}
SIZE = 10 * MIB


def reduced(own, callbacks: dict[str, dict[str, object]] | None = None):
    found = setup(own, choose(callbacks, **ONE))
    return reduce(found, lay_out(found)[0])


def test_a_plain_bucket() -> None:
    found = reduced(machine(4))
    assert found.sent_bytes == 1.5 * SIZE and found.wire.seconds == pytest.approx(1.5 * SIZE / 1e6)
    assert not found.encode_s and not found.decode_s


def test_hierarchical_sends_what_its_card_says() -> None:
    """Inside 2 (L - 1) / L, across 2 (M - 1) / M of a rank's share, on 2 nodes of 4 ranks."""
    found = reduced(machine(8, 4), {"hierarchical": {}})
    assert found.sent_bytes == pytest.approx(1.5 * SIZE + SIZE / 4)
    assert found.wire.seconds == pytest.approx(SIZE / 4 / 1e6)


def test_inter_compresses_between_nodes_alone() -> None:
    bf16 = {"grad_compress": {"codec": "bf16", "level": "inter"}, "hierarchical": {}}
    assert reduced(machine(8, 4), bf16).sent_bytes == pytest.approx(1.5 * SIZE + SIZE / 8)
    bf16["grad_compress"]["level"] = "all"
    assert reduced(machine(8, 4), bf16).sent_bytes == pytest.approx(0.75 * SIZE + SIZE / 8)


def test_a_gathering_codec_decodes_each_payload() -> None:
    own = machine(4, codecs={"topk": CodecCost(2e-9, 1e-9), "int8": CodecCost(2e-9, 1e-9)})
    topk, int8 = (reduced(own, {"grad_compress": {"codec": codec}}) for codec in ("topk", "int8"))
    assert (topk.encode_s, topk.decode_s) == pytest.approx((2e-9 * SIZE, 4e-9 * SIZE))
    assert (int8.encode_s, int8.decode_s) == pytest.approx((2e-9 * SIZE, 1e-9 * SIZE))
    assert topk.job(codec=False).phases[0] == Phase(0.0, 1.0) and topk.job().phases[0].seconds == 2e-9 * SIZE


def test_copies_are_a_plain_bucket_s() -> None:
    own = machine(codecs={**CODECS, "none": CodecCost(1.0, 2.0)})
    assert copying(setup(own)) == CodecCost(1.0, 2.0)
    assert copying(setup(own, choose(trainer__ddp__gradient_as_bucket_view=True))) == CodecCost(0.0, 0.0)
