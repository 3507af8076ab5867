"""Images reach the device as uint8, whichever loader has read them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.bench.one_gpu import images
from scripts.bench.one_gpu.cells import TINY, Cell

CELL = Cell("images", micro=4, size=TINY, warm=1, timed=2)


@pytest.mark.parametrize("trainer", ["Echelon", "bare loop"])
def test_images_are_counted_and_stay_uint8(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def loss(self: images.Images, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append((batch["x"].dtype, tuple(batch["x"].shape)))
        return model(batch["x"])

    monkeypatch.setattr(images.Images, "loss", loss)
    found = images.time_images(replace(CELL, trainer=trainer), torch.device("cpu"), tmp_path)
    assert set(seen) == {(torch.uint8, (4, 3, 16, 16))}
    assert found["GB/s"] == pytest.approx(found["images/s"] * 3 * 16 * 16 / 1e9) and found["side"] == 16
