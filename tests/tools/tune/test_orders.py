"""Each kind of order on real ranks."""

from pathlib import Path
from typing import Any

import pytest
from support.configs import toy_config
from support.ranks import run_ranks

from trainer.process.environment import Place
from trainer.tools.tune.configs import alone, of_trial
from trainer.tools.tune.orders import run_order


def obey(place: Place, order: dict[str, Any]) -> dict[str, Any]:
    return run_order(order, place)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("trial", "losses"),
        ("profile", "forward_s"),
        ("outline", "shapes"),
        pytest.param("links", "levels", marks=pytest.mark.slow),
    ],
)
def test_orders(kind: str, key: str, tmp_path: Path) -> None:
    config = toy_config()
    own = of_trial(alone(config, 2) if kind == "profile" else config, tmp_path / "own", 1, 60, 6)
    order = {"kind": kind, "config": own, "folder": str(tmp_path / "own"), "warm": 1, "steps": 2, "codecs": False}
    answers = run_ranks(2, obey, {**order, "folder": str(tmp_path / "own")})
    assert all(key in answer for answer in answers)
