"""Checks for your own callbacks."""

from trainer.testing.contract import check_callback

__all__ = ["check_callback"]
