"""Clusters of network namespaces for tests, and the mark of a test that needs one."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable

import pytest

from scripts.cluster.netns import Cluster, namespaces

__all__ = ["Cluster", "left_behind", "namespaces", "needs_cluster"]
OTHERS_S = 60  # in which tests beside this one remove theirs


def lacking() -> str:
    if os.geteuid() != 0:
        return "not root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "no iproute2"
    allowed = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0
    return "" if allowed else "this root may not make network namespaces"


needs_cluster = pytest.mark.skipif(bool(lacking()), reason=f"no network namespaces: {lacking()}")


def left_behind(before: Iterable[str]) -> set[str]:
    """Return the namespaces that were not there before, and stay."""
    left, deadline = set(namespaces()) - set(before), time.monotonic() + OTHERS_S
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left &= set(namespaces())
    return left
