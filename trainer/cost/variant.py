"""Knobs that a callback offers a search."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Situation(NamedTuple):
    """The run that is being searched.

    Attributes:
        blocks: The model's blocks, between which a pipeline may cut it; 0: unknown.
        step: The step at which a trial begins.
    """

    ranks: int
    nodes: int
    blocks: int
    step: int

    @property
    def two_levels(self) -> bool:
        """Return whether there are several nodes, each with several ranks."""
        return 1 < self.nodes < self.ranks


class Variant(NamedTuple):
    """Knobs of a callback, and the callbacks that are tried with it, with theirs."""

    knobs: Mapping[str, Any]
    others: Mapping[str, Mapping[str, Any]] = {}
