"""Parts of a row of parameters."""

from trainer.parallel.evenly import evenly


def test_parts_have_about_as_many_elements() -> None:
    assert evenly([4, 4, 4, 4], 2) == [[0, 1], [2, 3]]
    assert evenly([8, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4]]


def test_there_are_no_empty_parts() -> None:
    assert evenly([5], 3) == [[0]] and evenly([3, 0], 1) == [[0, 1]]
