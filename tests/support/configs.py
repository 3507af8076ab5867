"""The toy recipe's config, which is composed once in a process."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from support.cli import ROOT
from trainer.config.compose import compose
from trainer.config.folders import CONF

FOLDER = ROOT / "tests" / "toy" / "conf"


@cache
def _composed() -> Any:
    with pytest.MonkeyPatch.context() as patch:  # it changes both
        patch.setattr("sys.argv", ["tune"])
        patch.setenv("HYDRA_FULL_ERROR", "1")
        return compose(["--config-dir", str(FOLDER), "recipe=toy"], [CONF, FOLDER])[0].config


def toy_config() -> Any:
    """Return a copy, which a test may change."""
    return deepcopy(_composed())
