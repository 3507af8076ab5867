"""Skips tests whose packages are missing, and imports none of these: every worker collects every module."""

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")
