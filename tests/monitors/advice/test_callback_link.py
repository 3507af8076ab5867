"""Speeds of PCIe links, as the kernel writes them, against those of the standard."""

from pathlib import Path

import pytest

from trainer.monitors.advice.callback import link_speed as speed

# GB/s of one direction, of PCI-SIG's tables.
KNOWN = [("8.0 GT/s PCIe", 16, 15.754), ("16.0 GT/s PCIe", 16, 31.508), ("32.0 GT/s PCIe", 8, 31.508)]
KNOWN += [("2.5 GT/s PCIe", 1, 0.25), ("5 GT/s", 4, 2.0), ("64.0 GT/s PCIe", 16, 121.0)]


@pytest.mark.parametrize(("rate", "lanes", "gigabytes"), KNOWN)
def test_the_speed_of_a_link(rate: str, lanes: int, gigabytes: float, tmp_path: Path):
    (tmp_path / "max_link_speed").write_text(f"{rate}\n")
    (tmp_path / "current_link_width").write_text(f"{lanes}\n")
    assert speed(tmp_path) * (1 << 20) / 1e9 == pytest.approx(gigabytes, rel=1e-3)


@pytest.mark.parametrize(("rate", "lanes"), [("Unknown", "16"), ("16.0 GT/s PCIe", "x"), ("9.0 GT/s", "16")])
def test_a_link_of_which_nothing_is_known(rate: str, lanes: str, tmp_path: Path):
    assert speed(tmp_path) == 0.0
    (tmp_path / "max_link_speed").write_text(rate)
    (tmp_path / "current_link_width").write_text(lanes)
    assert speed(tmp_path) == 0.0
