"""The variants of a callback that a search tries."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Situation(NamedTuple):
    """The run whose configuration is being searched."""

    ranks: int
    nodes: int
    blocks: int  # between which a pipeline may cut the model; 0 if unknown
    step: int  # at which a trial begins

    @property
    def two_levels(self) -> bool:
        """Whether there are several nodes with several ranks each."""
        return 1 < self.nodes < self.ranks


class Variant(NamedTuple):
    """Settings of a callback, and the callbacks to combine it with, with theirs."""

    knobs: Mapping[str, Any]
    others: Mapping[str, Mapping[str, Any]] = {}
