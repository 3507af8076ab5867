"""Tells whether a notebook shows this process's output, and makes tables for it."""

import os
import sys
from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain, repeat

RANK = "ECHELON_IN_NOTEBOOK"  # set in the ranks that a notebook's cell starts, whose lines the cell prints


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, such as Jupyter's or Colab's."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython else None, "kernel")


def shown_in_notebook() -> bool:
    return in_notebook() or RANK in os.environ


def table(rows: Iterable[Sequence[str]], heads: Sequence[str] = ()) -> str:
    """Return an HTML table of texts. Without `heads`, the first cell of each row is its name."""

    def line(kinds: Iterable[str], texts: Sequence[str]) -> str:
        cells = (
            f'<{kind} style="text-align: left">{escape(text)}</{kind}>'
            for kind, text in zip(kinds, texts, strict=False)
        )
        return f"<tr>{''.join(cells)}</tr>"

    head = [line(repeat("th"), heads)] if heads else []
    body = (line(repeat("td") if heads else chain(["th"], repeat("td")), row) for row in rows)
    return f"<table>{''.join([*head, *body])}</table>"
