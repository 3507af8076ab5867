"""Distances on a PCI tree that the test builds, in the words of nvidia-smi's matrix."""

from pathlib import Path

import pytest

from trainer.tools.doctor.links import chain, distance, matrix, table

# Two sockets. On the first: a switch with two GPUs, a switch behind it with a GPU, a card at another root port.
TREE = {
    "0000:03:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:04.0",
    "0000:04:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:08.0",
    "0000:07:00.0": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:0c.0/0000:05:00.0/0000:06:00.0",
    "0000:08:00.0": "pci0000:00/0000:00:02.0",
    "0000:40:00.0": "pci0000:40/0000:40:01.0",
    "0000:80:00.0": "pci0000:80/0000:80:01.0",
}
NODES = {"0000:80:00.0": 1}


@pytest.fixture
def sys(tmp_path) -> Path:
    (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True)
    for address, path in TREE.items():
        folder = tmp_path / "devices" / path / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{NODES.get(address, 0)}\n")
        (tmp_path / "bus" / "pci" / "devices" / address).symlink_to(folder)
    return tmp_path


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        ("0000:03:00.0", "0000:04:00.0", "PIX"),
        ("0000:03:00.0", "0000:07:00.0", "PXB"),
        ("0000:03:00.0", "0000:08:00.0", "PHB"),
        ("0000:03:00.0", "0000:40:00.0", "NODE"),
        ("0000:03:00.0", "0000:80:00.0", "SYS"),
        ("0000:03:00.0", "0000:99:00.0", "?"),
    ],
)
def test_the_word_of_two_devices(sys, one, other, word):
    assert distance(sys, one, other) == distance(sys, other, one) == word


def test_an_unknown_numa_node_is_another_one(sys):
    for address in ("0000:40:00.0", "0000:08:00.0"):
        (sys / "bus" / "pci" / "devices" / address / "numa_node").write_text("-1\n")
    assert distance(sys, "0000:40:00.0", "0000:08:00.0") == "SYS"


def test_the_path_of_a_device(sys):
    assert chain(sys, "0000:08:00.0") == ["pci0000:00", "0000:00:02.0", "0000:08:00.0"]
    assert chain(sys, "0000:99:00.0") == []


def test_the_matrix_names_links_before_bridges(sys):
    devices = {"GPU0": "0000:03:00.0", "GPU1": "0000:04:00.0", "mlx5_0": "0000:80:00.0"}
    links = {("0000:03:00.0", "0000:04:00.0"): 18, ("0000:04:00.0", "0000:03:00.0"): 18}
    words = matrix(sys, devices, links, ["GPU0", "GPU1"])
    assert words == {
        "GPU0": {"GPU0": "X", "GPU1": "NV18", "mlx5_0": "SYS"}, "GPU1": {"GPU0": "NV18", "GPU1": "X", "mlx5_0": "SYS"},
    }  # fmt: skip
    assert table(words) == ["      GPU0  GPU1  mlx5_0", "GPU0  X     NV18  SYS", "GPU1  NV18  X     SYS"]
