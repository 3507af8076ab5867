"""What holds for every test here: a folder of its own, and no setting of torch left to the next."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path) -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
