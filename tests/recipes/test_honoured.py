"""The page of what is honoured is that of the tables, and each test that it names exists."""

import re

import pytest
from support import honoured
from support.cli import ROOT


def test_the_page_is_that_of_the_tables():
    assert honoured.PAGE.read_text() == honoured.text(), "run PYTHONPATH=tests python -m support.honoured"


@pytest.mark.parametrize("table", honoured.TABLES, ids=lambda table: table.title)
def test_no_name_is_in_both_columns_and_each_test_exists(table):
    assert not table.given.keys() & table.refused.keys()
    assert not table.without_effect.keys() & (table.given.keys() | table.refused.keys())
    for test in set(table.given.values()):
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test
    assert all(reason and "|" not in reason for reason in table.refused.values())
