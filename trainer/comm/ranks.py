"""Creates process groups, and runs small collectives between ranks."""

import json
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.annotated import called
from trainer.comm import nccl
from trainer.comm.device import count_gpus, pick_backend, pick_device
from trainer.comm.phases import Phase, during
from trainer.errors import UNAVAILABLE, ConfigError, UnavailableError
from trainer.process.environment import Place
from trainer.timeouts import START_S, STILL

LENGTH, BLOCK = 8, 1024  # bytes: the length prefix of a gathered value, and the first collective of a gather
RING = 32  # most ranks for which gloo's ring collectives are used: 62 hops of 50 us hide behind a forward pass
COLLECTIVES = 2000  # recent collectives that are recorded for `Ranks.note_failure`
GLOO = ("gloo/transport", "caused pair closure")  # every error of a gloo collective contains one of these
MET: dict[str, tuple[dist.Store, int]] = {}  # meeting address -> the store, and how often ranks have met there
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # torch's flight recorders: gloo and, with CUDA, NCCL


class Ranks:
    """This process among its peers. On a single rank there are no groups, and every call returns at once.

    Small collectives use a gloo group on the CPU, so that a device never waits for them.
    """

    def __init__(self, place: Place, accelerator: str, backend: str, timeout_s: float) -> None:
        self.rank, self.world, self.place = place.rank, place.world, place
        self.device = pick_device(accelerator, place)
        self.backend = pick_backend(backend, self.device)
        self.timeout = timedelta(seconds=timeout_s)
        self.own_groups = list[dist.ProcessGroup]()  # of agreements, whose messages are not those of training
        if self.world == 1:
            return
        refuse_alone(place)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(COLLECTIVES))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        if self.backend == "nccl" and (name := nccl.interface(os.environ)):  # clusters may set only NCCL's
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        with meeting(place, timeout_s):
            dist.init_process_group(
                self.backend,
                store=meeting_place(place),
                rank=self.rank,
                world_size=self.world,
                timeout=self.timeout,
                # NCCL connects now, on this device. Otherwise torch 2.15 would guess a device from the rank.
                device_id=self.device if self.backend == "nccl" else None,
            )
        self.host = self.new_group("gloo")
        self.untimed = self.new_group("gloo", timedelta(days=30))
        self.own_groups = [self.host, self.untimed]
        if self.world > RING:
            self.agree_thread, self.agree_group = ThreadPoolExecutor(1, "agree"), self.new_group("gloo")
            self.own_groups.append(self.agree_group)
        dist.barrier(self.host)  # otherwise a rank that raises soon could cut off one that is still connecting

    def __repr__(self) -> str:
        return called(self, "rank", "world", "device", "backend")

    def gpus_hidden(self) -> bool:
        """Return whether srun shows each task only its own GPU, although NCCL connects several on this node."""
        several = self.backend == "nccl" and self.place.launcher == "srun" and self.place.local_world > 1
        return several and count_gpus("cuda") == 1

    def new_group(self, backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """Create a group; each thread or stream that communicates needs its own. A collective."""
        group = dist.new_group(backend=backend or self.backend, timeout=timeout or self.timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def group_of(self, some: list[int]) -> Any:
        """Create a group of some ranks; the others get torch's placeholder. A collective of all ranks."""
        return dist.new_group(some, backend=self.backend, timeout=self.timeout)

    def set_timeout(self, seconds: float) -> None:
        """Change the timeout of later collectives in existing groups. `each` and `first` still have none."""
        for group in () if self.world == 1 else list(dist.distributed_c10d._world.pg_map):
            if group is not self.untimed:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def new_groups(self, parts: list[list[int]]) -> dist.ProcessGroup:
        """Create a group for each of the `parts`, which partition the ranks; return this rank's. A collective."""
        own, _ = dist.new_subgroups_by_enumeration(parts, timeout=self.timeout, backend=self.backend)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def ranks_per_node(self, callback: str) -> int:
        """Return how many ranks the launcher started per node, which `callback` needs to be equal on all nodes. A
        collective.
        """
        places = self.gather([self.place.local_rank, self.place.local_world])
        per_node = places[0][1]
        for rank, place in enumerate(places):
            if place != [rank % per_node, per_node]:
                raise ConfigError(
                    f"callbacks.{callback}: rank {rank} has local rank {place[0]} of {place[1]}, and rank 0's node "
                    f"has {per_node} ranks; start as many on each node, node by node, or leave {callback} out"
                )
        return per_node

    def agree(self, values: tuple[int, ...], limit_s: float | None = None) -> Callable[[], tuple[int, ...]]:
        """Start summing `values` over ranks, and return a function that waits for the sums, or raises after `limit_s`.

        The sum runs while the caller works. Up to `RING` ranks, gloo's thread takes 2 (N - 1) sequential hops. With
        more ranks, a thread of ours takes log2 N rounds: 0.6 ms instead of 100 ms for 1,000 ranks at 50 us per hop.
        """
        if self.world == 1:
            return partial(tuple, values)
        word = torch.tensor(values, dtype=torch.int64)
        if self.world > RING:
            total = self.agree_thread.submit(add_up, word, self.agree_group)
            return during(Phase.COMMUNICATION)(lambda: tuple(total.result(limit_s).tolist()))
        work = dist.all_reduce(word, group=self.host, async_op=True)
        assert work is not None

        def sums() -> tuple[int, ...]:
            work.wait(timedelta(seconds=limit_s or 0))  # 0: the limit of the group
            return tuple(word.tolist())

        return sums

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Gather a JSON value from each rank, in rank order, on all ranks.

        The first collective sends `BLOCK` bytes: the length, and for most values the whole value. A second one sends
        the rest of longer values.
        """
        if self.world == 1:
            return [value]
        group = group or self.host
        text = json.dumps(value).encode()
        own = len(text).to_bytes(LENGTH, sys.byteorder) + text
        rows = all_gather(padded(own[:BLOCK], BLOCK), group)
        sizes = rows[:, :LENGTH].contiguous().view(torch.int64).flatten().tolist()
        if (more := LENGTH + max(sizes) - BLOCK) > 0:
            rows = torch.cat([rows, all_gather(padded(own[BLOCK:], more), group)], 1)
        return [json.loads(row[LENGTH : LENGTH + size].numpy().tobytes()) for row, size in zip(rows, sizes)]

    def each(self, value: Any) -> list[Any]:
        """Gather like `gather`, but without a timeout, because rank 0 may have to prepare a corpus first."""
        return self.gather(value, self.untimed if self.world > 1 else None)

    def first(self, value: Any) -> Any:
        """Return rank 0's JSON value on all ranks, without a timeout."""
        return self.each(value if self.rank == 0 else None)[0]

    def note_failure(self, kind: type[BaseException] | None, logs: Path) -> None:
        """Write this rank's last collectives into the folder `logs` if one of them may have failed.

        They come from torch's flight recorder. If ranks diverged, their last collectives differ.
        """
        if self.world > 1 and kind and issubclass(kind, RuntimeError):
            with suppress(OSError, ValueError, KeyError):  # such an error would hide the failure
                c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
                traces = [json.loads(getattr(c10d, name, bytes)() or "{}") for name in RECORDERS]
                entries = chain(*(trace.get("entries", ()) for trace in traces))
                noted = {**traces[0], "entries": sorted(entries, key=itemgetter("time_created_ns"))}
                (logs / f"collectives-rank{self.rank}.json").write_text(json.dumps(noted))

    def leave(self) -> None:
        """Destroy the groups once all ranks have arrived. A collective.

        Otherwise a launcher might kill rank 0, which may still be writing, as soon as another rank exits.
        """
        if self.world > 1 and dist.is_initialized():
            self.first(None)
        self.close()

    def close(self) -> None:
        """Destroy the groups at once, so that peers waiting for this rank get an error."""
        if self.world > 1 and dist.is_initialized():
            keep_store(self.place)
            dist.destroy_process_group()


def in_collective(error: BaseException) -> bool:
    """Return whether the error comes from a collective, so that a peer may have failed first."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO)


def refuse_alone(place: Place) -> None:
    """Refuse RANK without a rendezvous address, which every launcher sets, and an invalid port."""
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if absent and place.launcher == "torchrun":
        raise ConfigError(
            f"RANK={place.rank}: is set without {' and '.join(absent)}, so no launcher has set it; unset it, or start "
            "by torchrun or srun"
        )
    port = "" if place.store else os.environ.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        service = "; Kubernetes sets it if a service is called `master`" if "://" in port else ""
        raise ConfigError(f"MASTER_PORT={port}: must be a number from 1 to 65535{service}")


@contextmanager
def meeting(place: Place, timeout_s: float) -> Iterator[None]:
    """Raise UnavailableError if the ranks of a launcher don't meet at its address.

    If another program listens there, torch waits for an answer without a limit, so a timer ends this process instead.
    """
    limit_s = max(STILL * timeout_s, START_S)
    silent = threading.Timer(limit_s, end_unmet, (place, limit_s))
    silent.daemon = True
    if not place.store:
        silent.start()
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if place.store:
            raise
        raise UnavailableError(unmet(place, timeout_s, str(error).partition("\n")[0].rstrip("."))) from error
    finally:
        silent.cancel()


def unmet(place: Place, seconds: float, reason: str) -> str:
    address = " ".join(f"{name}={os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    taken = "another program has this port; give a free MASTER_PORT to all of them"
    fix = taken if "EADDRINUSE" in reason else "start all of them, and let each reach this address"
    return f"{address}: rank {place.rank} did not meet all {place.world} ranks within {seconds:g} s ({reason}); {fix}"


def end_unmet(place: Place, seconds: float) -> None:
    """End this process, whose main thread is waiting for an answer that never comes."""
    text = unmet(place, seconds, "no rank 0 answers; another program may listen there")
    os.write(2, f"echelon: {text}\n".encode())
    os._exit(UNAVAILABLE)


def meeting_place(place: Place) -> dist.Store | None:
    """Return the store in which the ranks meet; None: torch creates one from MASTER_ADDR and MASTER_PORT.

    If ranks meet again, as for a second Trainer, they use another prefix in the old store, which has the old groups'
    addresses. A new server at the same port might not be up yet.
    """
    if (key := met_at(place)) in MET:
        store, times = MET[key]
        return dist.PrefixStore(f"again{times}", store)
    return dist.FileStore(place.store, place.world) if place.store else None


def keep_store(place: Place) -> None:
    """Keep the ranks' store until the process ends, so that they can meet again."""
    store, times = MET.get(key := met_at(place), (dist.distributed_c10d._get_default_store(), 0))
    MET[key] = store, times + 1


def met_at(place: Place) -> str:
    return place.store or ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))


def padded(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def share_buffers(module: nn.Module, group: dist.ProcessGroup | None, except_for: Container[str] = ()) -> None:
    """Broadcast the buffers of the group's first rank, except those named, as DDP does in training."""
    share([buffer for name, buffer in module.named_buffers() if name not in except_for], group)


def share(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast tensors from the group's first rank; None leaves them unchanged."""
    if group is not None and tensors:
        dist._broadcast_coalesced(group, tensors, 250 << 20, 0)


def add_up(word: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum integers (n,) over the ranks of `group`, in place, on the host.

    Pairs of ranks exchange sums at doubling distances (recursive doubling, Thakur et al. 2005). Ranks beyond the
    largest power of two send their numbers to a partner, and receive the sum.
    """
    rank, power = group.rank(), 1 << group.size().bit_length() - 1
    more, other = group.size() - power, torch.empty_like(word)

    def add_from(source: int) -> None:
        dist.recv(other, group=group, group_src=source)
        word.add_(other)

    if rank >= power:
        dist.send(word, group=group, group_dst=rank - power)
        dist.recv(word, group=group, group_src=rank - power)
        return word
    if rank < more:
        add_from(rank + power)
    for distance in (1 << k for k in range(power.bit_length() - 1)):
        sent = dist.isend(word.clone(), group=group, group_dst=rank ^ distance)
        add_from(rank ^ distance)
        assert sent is not None
        sent.wait()
    if rank < more:
        dist.send(word, group=group, group_dst=rank + power)
    return word


def all_gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather (n,) from each rank of `group` into (ranks, n) on all of them, on the host.

    gloo's all-gather takes N - 1 sequential hops. Above `RING` ranks, each rank's rows double in ceil(log2 N) rounds,
    for any N (Bruck et al. 1997, the concatenation algorithm), with equally many bytes.
    """
    rank, world, count = group.rank(), group.size(), 1
    rows = own.new_empty(world, own.numel())
    if world <= RING:
        dist.all_gather(list(rows), own, group)
        return rows
    rows[0] = own
    while count < world:  # row i is rank (rank + i)'s
        new = min(count, world - count)
        received = dist.irecv(rows[count : count + new], group=group, group_src=(rank + count) % world)
        dist.send(rows[:new], group=group, group_dst=(rank - count) % world)
        assert received is not None
        received.wait()
        count += new
    return rows.roll(rank, 0)
