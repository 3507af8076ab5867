"""The plan: what matters most comes first, within eight minutes."""

from scripts.bench.one_gpu.cells import LARGE, PEERS, TINY, ladder, miniatures, parts


def test_the_parts_come_in_order_of_worth_within_eight_minutes() -> None:
    plan = parts(139.0)
    names = [part.name for part in plan]
    assert names == ["tests", "overhead", "bert", "kernels", "ladder", "checkpoint", "images", "others"]
    assert sum(part.limit_s for part in plan) == 480 and min(part.limit_s for part in plan) >= 20
    for part in plan:
        assert len(set(part.cells)) == len(part.cells) == len({str(cell) for cell in part.cells})


def test_the_best_settings_of_all_trainers_come_first() -> None:
    cells = next(part.cells for part in parts(80.0) if part.name == "bert")
    assert [cell.trainer for cell in cells[:3]] == ["Echelon", *PEERS]
    assert all(cell.compiled == "blocks" and cell.sequence == 512 for cell in cells[:3])
    assert {(cell.trainer, cell.compiled) for cell in cells} == {
        ("Echelon", "blocks"), *((trainer, how) for trainer in ("bare loop", *PEERS) for how in ("no", "blocks"))
    }  # fmt: skip


def test_each_rung_adds_to_a_cell_of_the_plan() -> None:
    planned = {cell for part in parts(80.0) for cell in part.cells}
    for rung in ladder(64):
        assert {rung.cell, rung.on or rung.cell} <= planned, rung.name
    assert {rung.cell.precision for rung in ladder(64)} == {"bf16", "bf16_params", "fp8"}


def test_a_smaller_gpu_has_smaller_micro_batches() -> None:
    for gib, tokens in ((139.0, 64 * 512), (79.1, 64 * 512), (23.6, 16 * 512)):
        cells = [cell for part in parts(gib) for cell in part.cells if part.name in ("bert", "others")]
        assert {cell.micro * cell.sequence for cell in cells} == {tokens}


def test_a_miniature_is_small_and_has_the_same_settings() -> None:
    plan = parts(0.0)
    for whole, small in zip(plan, miniatures(plan), strict=True):
        assert (small.name, small.limit_s) == (whole.name, whole.limit_s)
        for cell, tiny in zip(whole.cells, small.cells, strict=True):
            assert cell.size != LARGE or (tiny.size == TINY and tiny.micro <= cell.micro and tiny.backend != "inductor")
            assert (tiny.kind, tiny.trainer, tiny.compiled) == (cell.kind, cell.trainer, cell.compiled)
