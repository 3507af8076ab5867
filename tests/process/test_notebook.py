"""A notebook's tables: texts stay texts."""

from trainer.process.notebook import RANK, in_notebook, shown_in_notebook, table


def test_texts_are_escaped():
    left = 'style="text-align: left"'
    rows = f"<tr><th {left}>&lt;b&gt;</th><td {left}>a &amp; b</td></tr>"
    assert table([("<b>", "a & b")]) == f"<table>{rows}</table>"
    assert table([("1", "2")], ["<i>", "y"]) == (
        f"<table><tr><th {left}>&lt;i&gt;</th><th {left}>y</th></tr><tr><td {left}>1</td><td {left}>2</td></tr></table>"
    )


def test_a_rank_of_a_notebook_is_shown_in_it(monkeypatch):
    assert not in_notebook() and not shown_in_notebook()
    monkeypatch.setenv(RANK, "1")
    assert shown_in_notebook() and not in_notebook()
