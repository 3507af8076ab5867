"""docs/composition.md says what the callbacks say."""

import composition


def test_the_page_is_up_to_date():
    assert composition.PAGE.read_text() == composition.page(), "run python tests/composition.py"
