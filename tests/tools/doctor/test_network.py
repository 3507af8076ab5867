"""Interfaces and cards of files that the test writes, and addresses that other machines can't reach."""

import socket
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.tools.doctor import network
from trainer.tools.doctor.finding import ERROR, NOTE, OK, WARNING


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_interfaces_with_their_speed_and_socket(tmp_path):
    eth, tun = "class/net/eth0", "class/net/tun0"
    write(tmp_path, {f"{eth}/operstate": "up\n", f"{eth}/speed": "100000\n", f"{eth}/mtu": "9000\n"})
    write(tmp_path, {f"{eth}/device/numa_node": "1\n", f"{tun}/operstate": "unknown\n", f"{tun}/mtu": "1500\n"})
    write(tmp_path, {"class/net/lo/mtu": "65536", "class/net/bonding_masters": ""})
    found = {finding.subject: finding for finding in network.examine(1, 1, tmp_path, {})}
    assert found["interface eth0"].value == "up, physical, 100 Gbit/s, mtu 9000, NUMA node 1"
    assert found["interface tun0"].value == "unknown, virtual, unknown speed, mtu 1500, NUMA node unknown"
    assert not {"interface lo", "interface bonding_masters", "address for other machines"} & found.keys()


def test_ports_of_remote_dma(tmp_path):
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = f"class/infiniband/{card}/ports/1"
        write(tmp_path, {f"{port}/state": state, f"{port}/rate": "400 Gb/sec (4X NDR)\n"})
        write(tmp_path, {f"{port}/link_layer": "InfiniBand\n", f"class/infiniband/{card}/device/numa_node": "0\n"})
    up, down = network.remote_dma(tmp_path)
    assert (up.level, up.value) == (OK, "ACTIVE, InfiniBand, 400 Gb/sec (4X NDR), NUMA node 0")
    assert (down.level, down.subject) == (WARNING, "remote DMA mlx5_1:1") and "nccl.ib_hca=^mlx5_1" in down.way_out


def test_a_loopback_that_is_down_ends_runs_of_several_ranks(monkeypatch):
    def down() -> None:
        raise ConfigError("down")

    monkeypatch.setattr(network, "refuse_without_loopback", down)
    assert [network.loopback(ranks).level for ranks in (1, 2)] == [NOTE, ERROR]


def test_without_an_interface_no_other_machine_is_reached(tmp_path):
    for nodes, level in ((1, NOTE), (2, ERROR)):
        found = {finding.subject: finding for finding in network.examine(1, nodes, tmp_path, {})}
        assert found["interfaces"].level == level


@pytest.mark.parametrize(
    ("variable", "value", "wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ""), ("GLOO_SOCKET_IFNAME", "eth", ERROR), ("GLOO_SOCKET_IFNAME", "lo", ""),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", ERROR), ("NCCL_SOCKET_IFNAME", "eth", ""),
        ("NCCL_SOCKET_IFNAME", "=eth", WARNING), ("NCCL_SOCKET_IFNAME", "=ib0,eth0", ""),
        ("NCCL_SOCKET_IFNAME", "ib", WARNING), ("NCCL_SOCKET_IFNAME", "^docker", ""),
    ],
)  # fmt: skip
def test_variables_that_name_no_interface_of_this_machine(variable, value, wrong):
    found = list(network.named(["eth0", "eth1"], {variable: value}))
    assert [finding.level for finding in found] == [wrong] * bool(wrong)
    assert all(finding.subject == f"{variable}={value}" and "eth0, eth1" in finding.way_out for finding in found)


@pytest.mark.parametrize(
    ("environ", "resolved", "level", "value"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.1.1", OK, "of interface ib0"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, None, OK, "of interface eth1"),  # a run gives it to gloo
        ({}, "10.0.0.3", OK, "10.0.0.3"),
        ({}, "127.0.1.1", WARNING, "127.0.1.1, as node7 resolves"),  # Debian's /etc/hosts
        ({}, None, WARNING, "the name node7 has none (no such name)"),
    ],
)
def test_the_address_that_gloo_announces(monkeypatch, environ, resolved, level, value):
    def resolve(name: str) -> str:
        if resolved is None:
            raise socket.gaierror(-2, "no such name")
        return resolved

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    found = network.announced(environ)
    assert (found.level, found.value) == (level, value)
