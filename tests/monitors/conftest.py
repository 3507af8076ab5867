"""Fixtures of monitors, which tell what they find in the log."""

import logging

import pytest

from trainer.log import log


@pytest.fixture
def messages(monkeypatch) -> list[str]:
    """The lines of the log, as they come."""
    found: list[str] = []
    monkeypatch.setattr(log, "handle", lambda record: found.append(record.getMessage()))
    monkeypatch.setattr(log, "level", logging.INFO)
    return found
