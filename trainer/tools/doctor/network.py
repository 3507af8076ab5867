"""Examines interfaces, cards for remote DMA, the loopback, and the address that gloo announces."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainer.errors import ConfigError
from trainer.process.cgroup import SYS
from trainer.process.environment import refuse_without_loopback
from trainer.tools.doctor.finding import ERROR, NOTE, WARNING, Finding, find
from trainer.tools.doctor.machine import read


def examine(
    local_world: int, nodes: int, sys: Path = SYS, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Yield what connects this machine's ranks to each other, and to other machines."""
    yield loopback(local_world)
    cards = [path.name for path in sorted((sys / "class" / "net").glob("*")) if path.name != "lo" and path.is_dir()]
    for card in cards:
        yield interface(sys / "class" / "net" / card)
    if not cards:
        level = ERROR if nodes > 1 else NOTE
        yield Finding("interfaces", "only the loopback", level, "other machines can't be reached")
    yield from remote_dma(sys)
    yield from named(cards, environ)
    if nodes > 1:
        yield announced(environ)


def loopback(local_world: int) -> Finding:
    try:
        refuse_without_loopback()
    except ConfigError:
        return Finding(
            "loopback", "down", ERROR if local_world > 1 else NOTE, "ranks of one machine can't connect",
            "switch it on by `ip link set lo up`, or give trainer.devices=1",
        )  # fmt: skip
    return Finding("loopback", "up")


def interface(folder: Path) -> Finding:
    state = read(folder / "operstate").strip() or "unknown"
    speed = read(folder / "speed").strip()  # in Mbit/s; -1 or an error of the driver: unknown
    rate = f"{int(speed) / 1000:g} Gbit/s" if speed.isdecimal() and int(speed) else "unknown speed"
    physical = "physical" if (folder / "device").exists() else "virtual"
    value = f"{state}, {physical}, {rate}, mtu {read(folder / 'mtu').strip()}, NUMA node {near(folder)}"
    return Finding(f"interface {folder.name}", value)


def near(folder: Path) -> str:
    node = read(folder / "device" / "numa_node").strip()
    return node if node.isdecimal() else "unknown"


def remote_dma(sys: Path) -> Iterator[Finding]:
    """Yield each port of InfiniBand or RoCE, which NCCL prefers to interfaces."""
    ports = sorted((sys / "class" / "infiniband").glob("*/ports/*"))
    if not ports:
        yield Finding("remote DMA", "no InfiniBand or RoCE found")
    for port in ports:
        state = read(port / "state").partition(":")[2].strip() or "unknown"
        rate, layer = read(port / "rate").strip(), read(port / "link_layer").strip()
        card = port.parents[1].name
        yield find(
            state != "ACTIVE", f"remote DMA {card}:{port.name}",
            f"{state}, {layer}, {rate}, NUMA node {near(port.parents[1])}", WARNING,
            "NCCL can't use it, and others carry its traffic",
            f"see its cable and switch, or leave it out: nccl.ib_hca=^{card}",
        )  # fmt: skip


def named(cards: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield variables that name no interface of this machine. NCCL takes prefixes, gloo whole names."""
    whole = environ.get("GLOO_SOCKET_IFNAME", "")
    if absent := [name for name in whole.split(",") if name and name not in (*cards, "lo")]:
        yield Finding(
            f"GLOO_SOCKET_IFNAME={whole}", f"{', '.join(absent)} does not exist here", ERROR,
            "ranks can't connect by gloo", f"unset it, or name one of {', '.join(cards) or 'lo'}",
        )  # fmt: skip
    text = environ.get("NCCL_SOCKET_IFNAME", "")
    names, exact = text.removeprefix("=").split(","), text.startswith("=")
    known = [card for card in (*cards, "lo") for name in names if (card == name if exact else card.startswith(name))]
    if text and not text.startswith("^") and not known:
        yield Finding(
            f"NCCL_SOCKET_IFNAME={text}", "no such interface exists here", WARNING, "ranks can't connect by NCCL",
            f"unset it, or name one of {', '.join(cards) or 'lo'}",
        )  # fmt: skip


def announced(environ: Mapping[str, str]) -> Finding:
    """Examine the address that gloo announces to other machines: the host name's, unless a variable is set."""
    if name := environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME"):
        return Finding("address for other machines", f"of interface {name}")
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        reason = f"the name {host} has none ({error.strerror})"
    else:
        if not address.startswith("127."):
            return Finding("address for other machines", address)
        reason = f"{address}, as {host} resolves"
    return Finding(
        "address for other machines", reason, WARNING, "ranks of other machines can't connect to it",
        "name the interface: GLOO_SOCKET_IFNAME=eth0",
    )  # fmt: skip
