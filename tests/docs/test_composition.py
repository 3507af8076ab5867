"""docs/composition.md says what the callbacks say."""

from support import composition


def test_the_page_is_up_to_date():
    assert composition.PAGE.read_text() == composition.page(), "run PYTHONPATH=tests python -m support.composition"


def test_the_picture_is_up_to_date():
    assert composition.PICTURE.read_text() == composition.picture(), (
        "run PYTHONPATH=tests python -m support.composition"
    )


def test_the_picture_has_every_pair():
    matrix = composition.matrix()
    drawn = composition.picture()
    assert drawn.count('class="runs"') == list(matrix.cells.values()).count("+") + 1  # and one in the legend
    assert drawn.count('class="number"') == sum(value.isdigit() for value in matrix.cells.values()) + 1
