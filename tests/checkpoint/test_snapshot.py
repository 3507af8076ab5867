"""A snapshot is a copy of a state, in memory that the next one uses again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import loaded_from, same

from trainer.checkpoint.snapshot import Snapshot


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_snapshot_is_a_copy_and_uses_its_memory_again(tmp_path: Path) -> None:
    snapshot, weight, count = Snapshot(), torch.arange(6.0).view(2, 3).t(), [1]
    state = {"model": {"w": weight, "flag": torch.tensor(True)}, "count": count}
    files = snapshot.take(state)
    buffer = snapshot.buffers["model"]
    expected = weight.clone()
    weight.zero_()
    count[0] = 2

    def stored() -> dict[str, Any]:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        return loaded_from(tmp_path)

    assert same(stored(), {"model": {"w": expected, "flag": torch.tensor(True)}, "count": [1]})
    files = snapshot.take(state)
    assert snapshot.buffers["model"] is buffer
    assert same(stored(), {"model": {"w": torch.zeros(3, 2), "flag": torch.tensor(True)}, "count": [2]})
    for other in (torch.ones(2, 3), torch.ones(3, 2, dtype=torch.int32)):
        files = snapshot.take({"model": {"w": other, "flag": torch.tensor(False)}, "count": count})
        assert snapshot.buffers["model"] is not buffer
        assert same(stored()["model"], {"w": other, "flag": torch.tensor(False)})
