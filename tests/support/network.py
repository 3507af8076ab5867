"""Clusters of network namespaces for tests, and the mark of a test that needs one."""

import os
import shutil
import subprocess

import pytest

from scripts.cluster.netns import Cluster, namespaces

__all__ = ["Cluster", "namespaces", "needs_cluster"]


def lacking() -> str:
    if os.geteuid() != 0:
        return "not root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "no iproute2"
    allowed = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode == 0
    return "" if allowed else "this root may not make network namespaces"


needs_cluster = pytest.mark.skipif(bool(lacking()), reason=f"no network namespaces: {lacking()}")
