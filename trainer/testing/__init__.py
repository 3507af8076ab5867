"""Checks for callbacks of one's own."""

from trainer.testing.contract import check_callback

__all__ = ["check_callback"]
