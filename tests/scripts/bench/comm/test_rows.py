"""Bytes by hand, and callbacks that can be built."""

import pytest

from scripts.bench.comm.rows import ROWS

SHAPES: list[tuple[int, ...]] = [(10, 8), (8,), (4, 3, 2), (2, 2)]  # 80 + 8 + 24 + 4 = 116 elements
# Bytes from each of 4 ranks. Rank 1 of matrices: 18 + 10 numbers, and 8 + 4 as they are, for 2 x 2 is not worth it.
BYTES = {
    "ddp-25": 1.5 * 464,
    "bf16": 1.5 * 232,
    "int8": 1.5 * (116 + 116 / 64),
    "topk": 3 * (4 * 1.16 + 116 / 16384),
    "dgc": 3 * (6 * 0.116 + 116 / 16384),
    "sign": 3 * (14.5 + 16),
    "powersgd-1": 1.5 * 4 * (28 + 12),
    "torch-powersgd-1": 1.5 * 4 * (28 + 12),
    "torch-local_sgd-16": 1.5 * 464 / 16,
    "powersgd-4": 1.5 * 4 * (72 + 8 + 24 + 4),
    "powersgd-4-bf16": 1.5 * 2 * (72 + 8 + 24 + 4),
    "blocksparse": 3 * 116 / 2048 + 1.5 * 464,
    "onebit_adam": 1.5 * (14.5 + 16),
    "overlap+int8": 1.5 * (116 + 116 / 64),
    "local_sgd-16": 1.5 * 464 / 16,
    "diloco-32-delay-16+int8": 1.5 * (116 + 116 / 64) / 32,
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_by_hand(name: str) -> None:
    sends = ROWS[name].sends
    assert sends is not None
    assert sends(SHAPES, 4) == pytest.approx(BYTES[name], rel=1e-12)


def test_every_row_can_be_built() -> None:
    for row in ROWS.values():
        assert row.build().keys() == row.callbacks.keys()
        assert row.warm % row.every == 0 and row.warm > 4
