"""Bytes by hand. tests/scripts/bench/comm/test_rows.py has more, and scripts.bench.comm compares them with a link's."""

import pytest

from trainer.comm.codecs.registry import make
from trainer.comm.codecs.sign import sign_bytes
from trainer.cost.messages import Message, plain, sent

SHAPES = [(10, 8), (8,), (4, 3, 2), (2, 2)]  # 80 + 8 + 24 + 4 = 116 elements


@pytest.mark.parametrize(
    ("collective", "size"), [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("reduce_scatter", 0.75)]
)
def test_what_four_ranks_send_of_a_byte(collective: str, size: float) -> None:
    assert Message(collective, 1).sent(4) == size and Message(collective, 1).sent(1) == 0


@pytest.mark.parametrize(
    ("codec", "knobs", "expected"),
    [
        ("bf16", {}, 1.5 * 232),
        ("fp16", {}, 1.5 * 236),
        ("int8", {"block": 64}, 1.5 * (116 + 4 * 116 / 64)),
        ("topk", {"density": 0.5}, 3 * (4 * 58 + 116 / 16384)),
        ("dgc", {}, 3 * (6 * 0.116 + 116 / 16384)),
        ("sign", {}, 3 * (14.5 + 16)),
        ("powersgd", {"rank": 1}, 1.5 * 4 * (28 + 12)),
        ("powersgd", {"rank": 1, "factors": "bf16"}, 1.5 * 2 * (28 + 12)),
        ("blocksparse", {"block": 4}, 3 * 116 / 32 + 1.5 * 464),
    ],
)
def test_bytes_of_a_codec(codec: str, knobs: dict[str, object], expected: float) -> None:
    assert sent(make(codec, knobs).messages(SHAPES, 4), 4) == pytest.approx(expected)


def test_bytes_of_plain_gradients_and_of_signs() -> None:
    assert sent(plain(SHAPES), 4) == 1.5 * 464 and sign_bytes(SHAPES) == 14.5 + 16


def test_a_rank_decodes_every_payload_that_is_gathered() -> None:
    assert [make(codec, {}).decodes(8) for codec in ("topk", "dgc", "sign", "int8", "bf16")] == [8, 8, 8, 1, 1]
