"""Makes a cluster on one machine: its hosts are network namespaces on one switch, with slow links.

    python -m scripts.cluster.netns run --hosts 2 --rate 100mbit -- python -m trainer.main ...   # up, run, down
    python -m scripts.cluster.netns up --hosts 4 --rate 1gbit                                    # prints NAME
    python -m scripts.cluster.netns run NAME --ranks-per-host 2 -- python -m trainer.main ...
    python -m scripts.cluster.netns down NAME

Needs Linux, root and iproute2. Each host has an eth0, which a token bucket (tbf) limits both ways. Every device is
inside the cluster's own namespaces, so clusters don't meet each other or the machine's network. The hosts share the
machine's CPU cores and its disk.
"""

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.command import command
from trainer.errors import STOPPED, ConfigError, nearest, require
from trainer.process.signals import held

Process = subprocess.Popen[Any]
# Every process in a host gets the interface to use, and one thread, since hosts share the cores.
HOST_ENV: dict[str, str] = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")
HOST_ENV |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Kills a process with its parent, even if that has ended already. Each word execs the next, so the pid stays.
MORTAL = ("setpriv", "--pdeathsig", "KILL", "sh", "-c", '[ $PPID = "$0" ] && exec "$@"')
PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NO_IPV6 = "cd /proc/sys/net/ipv6/conf/ && echo 1 >all/disable_ipv6 || true"  # it sends packets by itself
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


class Cluster:
    """Hosts with links of `rate` ("100mbit", "1gbit"; None: no limit), from `up` to `down` or while entered.

    Raises:
        ConfigError: an argument is wrong, or, by `up` and `find`, the machine can't make namespaces.
    """

    def __init__(self, hosts: int = 2, rate: str | None = None, name: str = "") -> None:
        if not 1 <= hosts <= 254:
            raise ConfigError(f"hosts={hosts}: the network has addresses for 1 to 254")
        discipline(rate)
        self.hosts, self._rate, self.name = hosts, rate, name or f"echelon-{secrets.token_hex(6)}"
        self.switch = f"{self.name}-switch"
        self._processes: list[Process] = []

    @classmethod
    def find(cls, name: str) -> "Cluster":
        """Find a cluster that is up."""
        check_machine()
        there = namespaces()
        names = [match[1] for match in map(re.compile(r"(echelon-[0-9a-f]{12})-switch").fullmatch, there) if match]
        if name not in names:
            raise ConfigError(f"{name}: no such cluster; {nearest(name, names)}")
        hosts = sum(re.fullmatch(rf"{name}-\d+", other) is not None for other in there)
        return cls(max(1, hosts), name=name)  # it has none if its `up` or `down` was killed

    def __enter__(self) -> "Cluster":
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        check_machine()
        try:
            for name in (self.switch, *map(self.namespace, range(self.hosts))):
                call("ip", "netns", "add", name)
                call("ip", "netns", "exec", name, "sh", "-c", NO_IPV6)
            call("ip", "-n", self.switch, "link", "add", "br0", "up", "type", "bridge")
            for host in range(self.hosts):
                self._connect(host)
            self.shape(self._rate)
        except BaseException:
            self.down()
            raise

    def _connect(self, host: int) -> None:
        inside = ("ip", "-n", self.namespace(host))
        call(*inside, "link", "set", "lo", "up")
        call(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{host}", "netns", self.switch)
        call(*inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        call(*inside, "link", "set", "eth0", "up")
        with contextlib.suppress(ConfigError):  # a kernel without cubic; a sysctl would change the machine
            call(*inside, "route", "change", "10.77.0.0/24", "dev", "eth0", "congctl", "cubic")
        call("ip", "-n", self.switch, "link", "set", f"p{host}", "up", "master", "br0")

    def shape(self, rate: str | None) -> None:
        words = discipline(rate)
        for host in range(self.hosts):
            for namespace, device in ((self.namespace(host), "eth0"), (self.switch, f"p{host}")):
                call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *words)

    def down(self) -> None:
        """End all processes in the cluster and remove it. A second call does nothing."""
        for process in self._processes:
            end(process)
        there = namespaces()
        for name in (
            *map(self.namespace, reversed(range(self.hosts))),
            self.switch,
        ):  # last, because `find` looks for it
            if name in there:
                deadline = time.monotonic() + 5  # for processes that end slowly
                while (pids := call("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
                    for pid in map(int, pids):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    time.sleep(0.01)
                call("ip", "netns", "del", name)

    def namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def sent(self, host: int) -> int:
        """Read the bytes sent through eth0 since `up`, with headers.

        The kernel hands over up to 64 KiB at a time and counts their headers once (0.1 %). The token bucket counts the
        headers of each frame (4.6 %), as a wire would.
        """
        return self._counter(host, "tx_bytes")

    def received(self, host: int) -> int:
        return self._counter(host, "rx_bytes")

    def _counter(self, host: int, name: str) -> int:
        return int(call("ip", "netns", "exec", self.namespace(host), "cat", f"/sys/class/net/eth0/statistics/{name}"))

    def popen(self, host: int, argv: Sequence[str], env: Mapping[str, str] = {}, **kwargs: Any) -> Process:
        """Start `argv` in the host, with `env` on top of this process's environment.

        The process has a session of its own, so a Ctrl-C does not reach it. It is killed with the calling thread.
        """
        words = [*MORTAL, str(os.getpid()), "ip", "netns", "exec", self.namespace(host), *argv]
        process = Process(words, env={**os.environ, **HOST_ENV, **env}, start_new_session=True, **kwargs)
        self._processes.append(process)
        return process

    def run(self, argv: Sequence[str], ranks_per_host: int = 1, env: Mapping[str, str] = {}, **popen: Any) -> list[int]:
        """Run `argv` once for each rank, with torchrun's variables, and return the exit codes by rank.

        If a rank fails, the others are killed, and their code is -9. `popen` goes to subprocess.Popen.
        """
        require("ranks_per_host", ranks_per_host, at_least=1)
        port = call("ip", "netns", "exec", self.namespace(0), sys.executable, "-I", "-S", "-c", FREE_PORT).strip()
        world = self.hosts * ranks_per_host
        ranks: list[Process] = []
        try:
            for rank in range(world):
                host, local_rank = divmod(rank, ranks_per_host)
                numbers = map(str, (rank, world, local_rank, ranks_per_host))
                place = dict(zip(PLACE, (self.address(0), port, *numbers)))
                ranks.append(self.popen(host, argv, {**env, **place}, **popen))
            while (codes := {rank.poll() for rank in ranks}) <= {None, 0, STOPPED} and None in codes:
                time.sleep(0.02)
        finally:
            for rank in ranks:
                end(rank)
        return [rank.returncode for rank in ranks]


def discipline(rate: str | None) -> list[str]:
    """Return tc's words for a link of this rate. The burst holds the kernel's largest packet, 64 KiB."""
    if rate is None:
        return ["noqueue"]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"rate={rate}: no rate of a link; write it as 100mbit or 1gbit, or leave it out for no limit")
    burst = "256kb" if float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] >= 1e9 else "128kb"
    return ["tbf", "rate", rate, "burst", burst, "latency", "30ms"]


def check_machine() -> None:
    if os.geteuid() != 0:
        raise ConfigError(f"user id {os.geteuid()}: only root can make network namespaces; use sudo")
    if not (shutil.which("ip") and shutil.which("tc")):
        raise ConfigError("ip, tc: not found; install iproute2 (Debian: apt-get install iproute2)")


def namespaces() -> set[str]:
    return {line.split()[0] for line in call("ip", "netns", "list").splitlines()}


def call(*command: str) -> str:
    """Run a command to its end, also at a Ctrl-C, which would else leave half a namespace."""
    with held():
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def end(process: Process) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def verdict(codes: list[int]) -> int:
    failed = {rank: code for rank, code in enumerate(codes) if code not in (0, STOPPED)}
    if not failed:
        return max(codes)
    rank, code = next((item for item in failed.items() if item[1] != -signal.SIGKILL), min(failed.items()))
    code = 128 - code if code < 0 else code  # a signal, as shells tell it
    print(f"echelon: rank {rank} ended with code {code}", file=sys.stderr)
    return code


def main(words: list[str]) -> int:
    options = argparse.ArgumentParser(
        "python -m scripts.cluster.netns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = options.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="make a cluster and print its name")
    run = verbs.add_parser("run", help="run a command on each rank, in a new cluster or in one that is up")
    down = verbs.add_parser("down", help="end all processes in a cluster and remove it")
    for verb in (up, run):
        verb.add_argument("--hosts", type=int, help="without it 2")
        verb.add_argument("--rate", help="of each link, each way: 100mbit, 1gbit, ...; without it no limit")
    run.add_argument("--ranks-per-host", type=int, default=1)
    run.add_argument("name", nargs="?", help="of a cluster that is up; without it a new one is removed after the run")
    down.add_argument("name")
    end_of_own = words.index("--") if "--" in words else len(words)
    args, argv = options.parse_args(words[:end_of_own]), words[end_of_own + 1 :]
    if args.verb == "down":
        Cluster.find(args.name).down()
        return 0
    if args.verb == "run" and not argv:
        raise ConfigError("run: no command; write it after --")
    if args.verb == "run" and args.name:
        if args.hosts is not None or args.rate is not None:
            raise ConfigError(f"run {args.name}: the cluster has its hosts and rate; leave out --hosts and --rate")
        return verdict(Cluster.find(args.name).run(argv, args.ranks_per_host))
    cluster = Cluster(2 if args.hosts is None else args.hosts, args.rate)
    if args.verb == "run":
        with cluster:
            return verdict(cluster.run(argv, args.ranks_per_host))
    cluster.up()
    print(cluster.name)
    return 0


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]))
