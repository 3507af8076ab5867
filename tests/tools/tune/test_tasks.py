"""Each kind of task on real ranks."""

from pathlib import Path
from typing import Any

import pytest
from support.configs import toy_config
from support.ranks import run_ranks

from trainer.process.environment import Place
from trainer.tools.tune.configs import alone, of_trial
from trainer.tools.tune.tasks import run_task


def serve(place: Place, task: dict[str, Any]) -> dict[str, Any]:
    return run_task(task, place)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("trial", "losses"),
        ("profile", "forward_s"),
        ("outline", "shapes"),
        pytest.param("links", "levels", marks=pytest.mark.slow),
    ],
)
def test_tasks(kind: str, key: str, tmp_path: Path) -> None:
    config = toy_config()
    own = of_trial(alone(config, 2) if kind == "profile" else config, tmp_path / "own", 1, 60, 6)
    task = {"kind": kind, "config": own, "folder": str(tmp_path / "own"), "warm": 1, "steps": 2, "lossy": False}
    answers = run_ranks(2, serve, task)
    assert all(key in answer for answer in answers)
