"""The matrix: what matters most comes first, and no cell comes twice."""

from scripts.bench.one_gpu.cells import LARGE, PEERS, matrix, miniature


def test_the_best_settings_of_all_trainers_come_first() -> None:
    cells = matrix(80.0)
    assert len(set(cells)) == len(cells) and len({str(cell) for cell in cells if cell.part == "speed"}) == sum(
        cell.part == "speed" for cell in cells
    )
    assert [cell.trainer for cell in cells[:3]] == ["Echelon", *PEERS]
    assert all(cell.compiled != "no" and cell.sequence == 512 for cell in cells[:3])
    assert {cell.part for cell in cells} == {"speed", "launches", "snapshot", "kernels"}
    assert {cell.precision for cell in cells} == {"bf16", "bf16_params", "fp8"}
    assert {cell.sequence for cell in cells if cell.part == "speed"} == {128, 512}
    assert {cell.recompute for cell in cells} == {"no", "selective", "full", "budget=0.5", "offload"}


def test_a_smaller_gpu_has_smaller_micro_batches() -> None:
    for gib, tokens in ((139.0, 64 * 512), (79.1, 64 * 512), (23.6, 16 * 512)):
        assert {cell.micro * cell.sequence for cell in matrix(gib) if cell.part == "speed"} == {tokens}


def test_a_miniature_is_small_and_has_the_same_settings() -> None:
    for whole, small in zip(matrix(80.0), miniature(matrix(80.0)), strict=True):
        assert small.size != LARGE and small.micro <= 2 and small.backend != "inductor"
        assert (small.trainer, small.precision, small.compiled) == (whole.trainer, whole.precision, whole.compiled)
