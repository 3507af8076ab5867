"""Links count bytes and have their rate; a cluster leaves nothing and touches nothing of the machine."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment
from support.faults import alive
from support.network import Cluster, namespaces, needs_cluster

NETNS = [sys.executable, "-m", "scripts.cluster.netns"]
PYTHON = [sys.executable, "-I", "-S", "-c"]  # fast to start
MB = 1_000_000
SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
peer, _ = server.accept()
left = int(sys.argv[2])
while left:
    left -= len(peer.recv(min(left, 1 << 16)))
peer.sendall(b"k")
"""
SLEEP = "sleep 60 & echo $(ip netns identify $$) $! $$; wait"
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
began = time.monotonic()
peer.sendall(bytes(int(sys.argv[2])))
assert peer.recv(1) == b"k"
print(time.monotonic() - began)
"""


def transfer(cluster: Cluster, sender: int, receiver: int, size: int) -> float:
    """Seconds until all has arrived."""
    to = [cluster.address(receiver), str(size)]
    with cluster.popen(receiver, [*PYTHON, SERVE, *to], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "listening\n"
        with cluster.popen(sender, [*PYTHON, SEND, *to], stdout=subprocess.PIPE, text=True) as client:
            seconds = float(client.communicate(timeout=30)[0])
    assert server.returncode == client.returncode == 0
    return seconds


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    line = [*NETNS, *words]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=30)


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def machine() -> tuple[list[str], bytes]:
    return sorted(os.listdir("/sys/class/net")), subprocess.check_output(["tc", "qdisc", "show"])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of clusters; nothing is left of them after the test, and a stranger's namespace and process, and the
    machine's own interfaces, are as before."""
    names: list[str] = []
    init = Cluster.__init__

    def noted(self: Cluster, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        names.append(self.name)

    monkeypatch.setattr(Cluster, "__init__", noted)
    before, stranger = machine(), f"echelon-stranger-{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", stranger], check=True)
    process = subprocess.Popen(["ip", "netns", "exec", stranger, "sleep", "60"])
    try:
        yield names
        assert process.poll() is None and stranger in namespaces()
        assert machine() == before
        assert names and not [left for left in namespaces() if left.startswith(tuple(names))]
    finally:
        process.kill()
        process.wait()
        subprocess.run(["ip", "netns", "del", stranger], check=True)


@needs_cluster
def test_counters_say_what_sockets_send(made) -> None:
    with Cluster(hosts=3) as cluster:
        transfer(cluster, 1, 0, 5 * MB)
        assert 5 * MB <= cluster.sent(1) <= 5.25 * MB
        assert 5 * MB <= cluster.received(0) <= 5.25 * MB
        assert max(cluster.sent(0), cluster.received(1)) < 0.25 * MB  # what acknowledges it
        assert max(cluster.sent(2), cluster.received(2)) < 10_000  # a switch, no hub


@needs_cluster
def test_links_are_as_slow_as_told_either_way(made) -> None:
    with Cluster(hosts=2) as cluster:
        for namespace, device in ((cluster.switch, "p1"), (cluster.namespace(0), "eth0")):  # one end is enough
            cluster.shape("100mbit")
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], check=True)
            assert transfer(cluster, 0, 1, 6 * MB) >= 0.4  # 0.48 s on a wire
        cluster.shape(None)
        ends = [(cluster.switch, f"p{host}") for host in range(2)] + [(cluster.namespace(i), "eth0") for i in range(2)]
        for namespace, device in ends:
            assert b"qdisc noqueue" in subprocess.check_output(["tc", "-n", namespace, "qdisc", "show", "dev", device])


@needs_cluster
def test_two_clusters_do_not_meet(made) -> None:
    with Cluster() as one, Cluster() as other:
        to = [one.address(0), "1"]
        with one.popen(0, [*PYTHON, SERVE, *to], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline() == "listening\n"
            failed = other.popen(1, [*PYTHON, SEND, *to], stderr=subprocess.PIPE, text=True)
            assert "ConnectionRefusedError" in failed.communicate(timeout=10)[1]
            other.down()
            assert server.poll() is None  # down of one is not down of both
            assert one.popen(1, [*PYTHON, SEND, *to], stdout=subprocess.DEVNULL).wait(10) == 0


@pytest.mark.slow
@needs_cluster
def test_gloo_meets_over_the_links(tmp_path: Path) -> None:
    reduce = (
        "import torch, torch.distributed as dist; torch.set_num_threads(1); dist.init_process_group('gloo');"
        f"x = torch.ones({MB // 2}); dist.all_reduce(x); assert x.eq(2).all(); dist.destroy_process_group()"
    )
    with Cluster(hosts=2, rate="1gbit") as cluster:
        assert cluster.run([sys.executable, "-c", reduce], cwd=tmp_path) == [0, 0]
        for host in range(2):  # a half to reduce and a half to gather, float32
            assert 2 * MB <= cluster.sent(host) <= 2.1 * MB


@needs_cluster
def test_ranks_have_the_variables_of_torchrun(tmp_path: Path) -> None:
    names = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $GLOO_SOCKET_IFNAME $OMP_NUM_THREADS $MORE"
    inside = "ip -o -4 addr show eth0 | grep -o '10.77.0.[0-9]*/'"
    with Cluster(hosts=2) as cluster:
        told = f"echo {names} $({inside}) >{tmp_path}/$RANK; echo $MASTER_PORT >>{tmp_path}/$RANK"
        assert cluster.run(["sh", "-c", told], ranks_per_host=2, env={"MORE": "x", "RANK": "7"}) == [0] * 4
    lines = [(tmp_path / str(rank)).read_text().split("\n") for rank in range(4)]
    assert [line for line, *_ in lines] == [
        "0 4 0 2 10.77.0.1 eth0 1 x 10.77.0.1/",
        "1 4 1 2 10.77.0.1 eth0 1 x 10.77.0.1/",
        "2 4 0 2 10.77.0.1 eth0 1 x 10.77.0.2/",
        "3 4 1 2 10.77.0.1 eth0 1 x 10.77.0.2/",
    ]
    assert len({port for _, port, _ in lines}) == 1 and int(lines[0][1]) > 1023


@needs_cluster
def test_a_failing_rank_ends_the_others() -> None:
    with Cluster(hosts=3) as cluster:
        assert cluster.run(["sh", "-c", "test $RANK != 1 && exec sleep 60; exit 3"]) == [-9, 3, -9]
        assert cluster.run(["sh", "-c", "test $RANK != 1 && sleep 0.2; exit 75"]) == [75, 75, 75]  # stopped, all saved
    done = command("run", "--hosts", "2", "--", "sh", "-c", "test $RANK = 0 && exec sleep 60; exit 3")
    assert (done.returncode, done.stderr) == (3, "echelon: rank 1 ended with code 3\n")


@needs_cluster
def test_nothing_is_left_of_a_failure(made, monkeypatch: pytest.MonkeyPatch) -> None:
    both = "setsid sh -c 'echo $$; exec sleep 60' & exec sleep 60"
    with pytest.raises(ZeroDivisionError), Cluster() as cluster:
        sleeper = cluster.popen(1, ["sh", "-c", both], stdout=subprocess.PIPE, text=True)
        assert sleeper.stdout is not None
        child = int(sleeper.stdout.readline())
        raise ZeroDivisionError
    assert sleeper.returncode == -signal.SIGKILL and not alive(child)
    sleeper.stdout.close()
    cluster.down()  # once more is no error
    monkeypatch.setattr(Cluster, "shape", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Cluster().up()


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_signal(number: signal.Signals, made) -> None:
    line = [*NETNS, "run", "--rate", "1gbit", "--", "sh", "-c", SLEEP]
    with subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().split() for _ in range(2)]
        made += [namespace.rpartition("-")[0] for namespace, *_ in told]
        pids = [int(pid) for _, *pids in told for pid in pids]
        assert len(pids) == 4 and all(map(alive, pids)) and set(made) <= {name[:20] for name in namespaces()}
        process.send_signal(number)
        assert eventually(lambda: not any(map(alive, pids[:2])))
        process.send_signal(number)  # while it cleans up
        assert process.wait(10) == 128 + number
    assert not any(map(alive, pids))


@needs_cluster
def test_nothing_is_left_of_a_signal_on_the_way_up(made) -> None:
    code = "from scripts.cluster.netns import Cluster; cluster = Cluster(8, '1gbit')"
    code += "; print(cluster.name, flush=True); cluster.up()"
    for delay_s in (0.02, 0.1):
        with subprocess.Popen(
            [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            made.append(process.stdout.readline().decode().strip())
            assert eventually(lambda: f"{made[-1]}-switch" in namespaces())
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == -signal.SIGINT


@needs_cluster
def test_up_run_and_down_by_name(made) -> None:
    done = command("up", "--hosts", "2", "--rate", "100mbit")
    name = done.stdout.strip()
    made.append(name)
    assert done.returncode == 0 and re.fullmatch(r"echelon-[0-9a-f]{12}", name), done.stderr
    try:
        ran = command("run", name, "--ranks-per-host", "2", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
        assert sorted(ran.stdout.splitlines()) == [f"{rank} of 4" for rank in range(4)]
        refused = command("run", name, "--rate", "1gbit", "--", "true")
        assert refused.returncode == 78 and refused.stderr.count("\n") == 1 and "leave out" in refused.stderr
        shaped = subprocess.check_output(["tc", "-n", f"{name}-1", "qdisc", "show", "dev", "eth0"], text=True)
        assert "tbf" in shaped and "rate 100Mbit" in shaped
        sleeper = subprocess.Popen(["ip", "netns", "exec", f"{name}-1", "sleep", "60"])
        wrong = command("down", name[:-1])
        assert wrong.returncode == 78 and wrong.stderr.count("\n") == 1
        assert wrong.stderr.startswith(f"echelon: {name[:-1]}: no such cluster; did you mean {name}")
    finally:
        assert command("down", name).returncode == 0
    assert sleeper.wait(10) == -signal.SIGKILL  # what another has started in it
    assert command("down", name).returncode == 78


@needs_cluster
def test_processes_end_with_a_killed_parent(made) -> None:
    code = (
        "import time; from scripts.cluster.netns import Cluster\n"
        "with Cluster() as cluster:\n"
        "    print(cluster.name, cluster.popen(1, ['sleep', '60']).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name, pid = process.stdout.readline().split()
        process.kill()
    try:
        assert eventually(lambda: not alive(int(pid)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)  # as if the parent had ended before its child asked for its signal
            assert Cluster.find(name).popen(1, ["sleep", "60"]).wait(10) == 1
    finally:
        Cluster.find(name).down()  # the namespaces stay, and this is the way out


@pytest.mark.parametrize("rate", ["", "100", "fast", "-1mbit", "0mbit", "1mbit ", "1 gbit", "100MBIT", "1mbps"])
def test_a_bad_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=r"^rate=.*: no rate of a link; write it as 100mbit"):
        Cluster(rate=rate)


def test_a_bad_number_of_hosts_is_refused() -> None:
    for hosts in (0, -1, 255):
        with pytest.raises(ValueError, match=rf"^hosts={hosts}: "):
            Cluster(hosts)


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for start in (Cluster().up, lambda: Cluster.find("echelon-0123456789ab")):
        with pytest.raises(ValueError, match=r"^user id 1000: only root can .*; use sudo$"):
            start()


def test_a_machine_without_iproute2_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^ip, tc: not found; install iproute2"):
        Cluster().up()


def test_the_command_tells_errors_in_one_line() -> None:
    for words in (("up", "--rate", "fast"), ("run",)):
        done = command(*words)
        assert (done.returncode, done.stdout) == (78, "")
        assert re.fullmatch(r"echelon: [^\n]+\n", done.stderr)
