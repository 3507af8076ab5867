"""Ranks: agreements between them, and what they run on."""

import json
import os
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.messages import refuses
from support.ranks import run_ranks

from trainer.comm.ranks import BLOCK, LENGTH, Ranks
from trainer.errors import ConfigError, UnavailableError
from trainer.process.environment import Place

CPU = torch.device("cpu")
FULL = BLOCK - LENGTH - 2  # characters, with two quotes, that fill the first block of a gathering
EDGES = (FULL, FULL + 1, 3 * BLOCK)


def agreements(place: Place, ring: int) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.comm.ranks.RING", ring)
        return agree(place)


def agree(place: Place) -> dict:
    ranks = Ranks(place, "cpu", "auto", 60.0)
    first = ranks.agree((place.rank, 2**40, -place.rank))
    second = ranks.agree((1,))  # two under way, read in the other order
    result = {
        "sums": [second(), first()],
        "gathered": ranks.gather({"name": "x" * place.rank * 7, "none": None, "rank": place.rank}),
        "lengths": [[len(text) for text in ranks.gather("x" * (place.rank * edge))] for edge in EDGES],
        "first": ranks.first(["from", place.rank]),
        "groups": len({id(ranks.new_group()) for _ in range(2)}),
        "timeouts": {
            ranks.host._get_backend(CPU).options._timeout,
            dist.group.WORLD._get_backend(CPU).options._timeout,
        },
    }
    ranks.close()
    return result | {"closed": not dist.is_initialized()}


@pytest.mark.parametrize(("world", "ring"), [(3, 32), (2, 0), (3, 0), (4, 0), (5, 0)])
def test_agreements_are_the_same_on_all_ranks(world, ring):
    """By gloo's ring, and in rounds of an all-gather, also where the ranks are no power of two."""
    for result in run_ranks(world, agreements, ring):
        total = world * (world - 1) // 2
        assert result["sums"] == [(world,), (total, world * 2**40, -total)]
        assert result["gathered"] == [{"name": "x" * rank * 7, "none": None, "rank": rank} for rank in range(world)]
        assert result["lengths"] == [[rank * edge for rank in range(world)] for edge in EDGES]
        assert result["first"] == ["from", 0]
        assert result["groups"] == 2
        assert result["timeouts"] == {timedelta(seconds=60)}
        assert result["closed"]


def rounds(place: Place) -> tuple[int, int]:
    """How many messages an agreement takes, and how many are in the thread of the caller."""
    sent, sends = list[threading.Thread](), {"send": dist.send, "isend": dist.isend}

    def counted(name: str, *args, **kwargs):
        sent.append(threading.current_thread())
        return sends[name](*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.comm.ranks.RING", 0)
        for name in sends:
            patch.setattr(dist, name, partial(counted, name))
        ranks = Ranks(place, "cpu", "auto", 60.0)
        ranks.agree((1,))()
        ranks.close()
    return len(sent), sent.count(threading.main_thread())


@pytest.mark.parametrize(("world", "expected"), [(2, 1), (3, 2), (4, 2), (5, 3)])
def test_an_agreement_of_many_ranks_takes_log2_n_rounds_beside_the_caller(world, expected):
    counts, of_caller = zip(*run_ranks(world, rounds), strict=True)
    assert max(counts) == expected and not any(of_caller)


def lost_peer(place: Place) -> float:
    """Seconds until an agreement fails that one rank never comes to. That rank lives until the others have failed."""
    failed = [Path(f"{place.store}-failed-{rank}") for rank in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.comm.ranks.RING", 0)
        ranks = Ranks(place, "cpu", "auto", 2.0)
        began = time.monotonic()
        if place.rank == 2:
            while not all(map(Path.exists, failed)) and time.monotonic() < began + 30:
                time.sleep(0.02)
        else:
            with pytest.raises(RuntimeError, match=r"Timed out|Connection closed by peer"):  # which timed out first
                ranks.agree((1,))()
        seconds = time.monotonic() - began
        if place.rank < 2:
            failed[place.rank].touch()
        ranks.close()
    return seconds


def test_an_agreement_in_rounds_has_the_limit_of_a_collective():
    first, second, _ = run_ranks(3, lost_peer)
    assert 1.5 < max(first, second) < 20


def late(place: Place) -> bool:
    ranks, written = Ranks(place, "cpu", "auto", 60.0), Path(f"{place.store}-written")
    if place.rank == 0:
        time.sleep(0.5)
        written.touch()
    ranks.leave()
    return written.exists()


def test_no_rank_ends_before_rank_0():
    """srun -K, mpirun and torchrun end all with the first that ends, and rank 0 may write a last checkpoint."""
    assert all(run_ranks(3, late))


def other_limit(place: Place) -> tuple[list[float], float]:
    """The limits of the groups, changed and set back; and whether a rank may be late in between."""
    ranks = Ranks(place, "cpu", "auto", 0.5)
    group, found = ranks.new_group(), []
    groups = (dist.group.WORLD, ranks.host, group)
    for seconds in (30.0, 0.5):
        ranks.set_timeout(seconds)
        found += [each._get_backend(CPU).options._timeout.total_seconds() for each in groups]
        if seconds > 1:
            time.sleep(1.0 * (place.rank == 1))
            dist.all_reduce(torch.ones(1), group=group)
    patient = ranks.untimed._get_backend(CPU).options._timeout
    ranks.close()
    return found, patient.days


def test_the_limit_of_groups_that_exist_can_be_changed_but_that_of_the_patient_one():
    assert run_ranks(3, other_limit) == [([30.0] * 3 + [0.5] * 3, 30)] * 3


def test_one_rank_starts_nothing():
    ranks = Ranks(Place(), "cpu", "auto", 60.0)
    assert not dist.is_initialized()
    assert ranks.agree((1, 2))() == (1, 2)
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    assert ranks.first("value") == "value"
    ranks.close()


@pytest.mark.parametrize(("device", "bound"), [("cuda:1", torch.device("cuda", 1)), ("cpu", None)])
def test_nccl_is_bound_to_the_device_of_the_rank(device, bound, monkeypatch):
    """Not to the one of LOCAL_RANK, which mpirun and srun may deal in another way."""
    told = []
    monkeypatch.setattr("trainer.comm.ranks.pick_device", lambda *_: torch.device(device))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: told.append((args, more["device_id"])))
    monkeypatch.setattr(Ranks, "new_group", lambda *_: None)
    monkeypatch.setattr(dist, "barrier", lambda _: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    Ranks(Place(5, 8, 1, 4), "auto", "auto", 60.0)
    assert told == [(("nccl" if bound else "gloo",), bound)]


@pytest.mark.parametrize(
    ("nccl", "backend", "gloo"),
    [("ib0", "nccl", "ib0"), ("=ib0", "nccl", "ib0"), ("ib", "nccl", None), ("^ib0", "nccl", None),
     ("ib0,eth0", "nccl", None), ("", "nccl", None), ("ib0", "gloo", None)],
)  # fmt: skip
def test_gloo_takes_the_interface_that_nccl_is_given_if_it_is_a_name(nccl, backend, gloo, monkeypatch):
    found = []
    monkeypatch.setattr("trainer.comm.ranks.pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: found.append(os.environ.get("GLOO_SOCKET_IFNAME")))
    monkeypatch.setattr(Ranks, "new_group", lambda *_: None)
    monkeypatch.setattr(dist, "barrier", lambda _: None)
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": nccl} if nccl else {})
    Ranks(Place(0, 2, 0, 1), "auto", backend, 60.0)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    Ranks(Place(0, 2, 0, 1), "auto", backend, 60.0)
    assert found == [gloo, "eth0"]


@pytest.mark.parametrize(
    ("launcher", "tasks", "seen", "hidden"),
    [("srun", 8, 1, True), ("srun", 8, 8, False), ("srun", 1, 1, False), ("torchrun", 8, 1, False)],
)
def test_srun_may_hide_the_gpus_of_a_node_from_each_other(launcher, tasks, seen, hidden, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    ranks = Ranks.__new__(Ranks)
    ranks.place, ranks.backend = Place(0, 16, 0, tasks, launcher=launcher), "nccl"
    assert ranks.gpus_hidden() == hidden
    ranks.backend = "gloo"
    assert not ranks.gpus_hidden()


def test_what_torch_notes_of_nccl_is_among_the_rest(monkeypatch, tmp_path):
    def notes(*times: int) -> bytes:
        return json.dumps({"version": "2", "entries": [{"time_created_ns": time} for time in times]}).encode()

    ranks = Ranks.__new__(Ranks)
    ranks.rank, ranks.world = 1, 3
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: notes(1, 4))
    for nccl, times in ((notes(2, 5), [1, 2, 4, 5]), (b'{"version": "2"}', [1, 4]), (b"", [1, 4])):
        monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda nccl=nccl: nccl, raising=False)
        ranks.note_failure(RuntimeError, tmp_path)
        noted = json.loads((tmp_path / "collectives-rank1.json").read_text())
        assert [entry["time_created_ns"] for entry in noted["entries"]] == times and noted["version"] == "2"


def test_a_rank_without_an_address_to_meet_at_is_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with refuses("RANK=1", "MASTER_ADDR", "MASTER_PORT"):
        Ranks(Place(1, 2, 1, 2, "", "torchrun"), "cpu", "gloo", 5.0)


@pytest.mark.parametrize(
    ("port", "line"),
    [
        ("tcp://10.3.2.1:29500", r"^MASTER_PORT=tcp://10\.3\.2\.1:29500: must be .*; Kubernetes sets it if "),
        ("99999", r"^MASTER_PORT=99999: must be a number from 1 to 65535$"),
        ("", r"^RANK=1: is set without MASTER_PORT, "),
    ],
)
def test_a_port_that_is_none_is_refused_before_the_ranks_meet(port, line, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=line):
        Ranks(Place(1, 2, 1, 2, "", "torchrun"), "cpu", "gloo", 5.0)


@pytest.mark.parametrize(("rank", "address"), [(0, "127.0.0.1"), (1, "127.0.0.1"), (1, "job-master-0.invalid")])
def test_ranks_that_do_not_meet_name_their_address_in_one_line(rank, address, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):  # which Ranks may set
        monkeypatch.setenv(name, "1")
    line = rf"^MASTER_ADDR={address} MASTER_PORT={port}: rank {rank} did not meet all 2 ranks within 1 s \(.+\); "
    with pytest.raises(UnavailableError, match=line):
        Ranks(Place(rank, 2, 0, 1, "", "torchrun"), "cpu", "gloo", 1.0)


def test_a_program_that_takes_the_port_and_never_answers_is_no_hang(monkeypatch, capfd):
    """torch would wait for its answer without a limit."""
    monkeypatch.setattr("trainer.comm.ranks.START_S", 0.3)
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        codes, address = [], f"MASTER_ADDR=127.0.0.1 MASTER_PORT={mute.getsockname()[1]}"
        for setting in address.split():
            monkeypatch.setenv(*setting.split("="))

        def end(code: int) -> None:
            codes.append(code)
            mute.accept()[0].close()
            mute.close()

        monkeypatch.setattr(os, "_exit", end)
        with pytest.raises(UnavailableError):
            Ranks(Place(1, 2, 1, 2, "", "torchrun"), "cpu", "gloo", 0.1)
    assert codes == [69]
    assert capfd.readouterr().err.startswith(f"echelon: {address}: rank 1 did not meet all 2 ranks within 0.3 s (")


def test_a_port_that_is_taken_is_named(monkeypatch):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with pytest.raises(UnavailableError, match=r"EADDRINUSE.*; another program has this port; give a"):
            Ranks(Place(0, 2, 0, 2, "", "torchrun"), "cpu", "gloo", 1.0)
