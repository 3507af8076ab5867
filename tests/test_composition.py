"""docs/composition.md says what the callbacks say."""

from support import composition


def test_the_page_is_up_to_date():
    assert composition.PAGE.read_text() == composition.page(), "run PYTHONPATH=tests python -m support.composition"
