"""Ranks: process groups, and small agreements between them."""

import json
import os
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.comm import nccl
from trainer.comm.device import count_gpus, pick_backend, pick_device
from trainer.errors import ConfigError
from trainer.process.environment import Place

RING = 32  # ranks up to which gloo's ring collectives are used: 62 hops of 50 us hide behind a forward pass
COLLECTIVES = 2000  # the last so many are kept, for `Ranks.note_failure`
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # torch's, of gloo's collectives and, with CUDA, of NCCL's


class Ranks:
    """This process among its peers. With one rank nothing is started, and every call answers at once.

    Agreements go over a gloo group of the CPU's own, so none of them makes a device wait.
    """

    def __init__(self, place: Place, accelerator: str, backend: str, timeout_s: float) -> None:
        self.rank, self.world, self.place = place.rank, place.world, place
        self.device = pick_device(accelerator, place)
        self.backend = pick_backend(backend, self.device)
        self.timeout = timedelta(seconds=timeout_s)
        if self.world == 1:
            return
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(COLLECTIVES))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        if self.backend == "nccl" and (name := nccl.interface(os.environ)):  # clusters may set NCCL's alone
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        dist.init_process_group(
            self.backend,
            store=dist.FileStore(place.store, self.world) if place.store else None,
            rank=self.rank,
            world_size=self.world,
            timeout=self.timeout,
            # NCCL connects now, on this device. Without it torch 2.15 guesses one from the rank's number.
            device_id=self.device if self.backend == "nccl" else None,
        )
        self.host = self.new_group("gloo")
        self.patient = self.new_group("gloo", timedelta(days=30))
        if self.world > RING:
            self.agree_thread, self.agree_group = ThreadPoolExecutor(1, "agree"), self.new_group("gloo")

    def gpus_hidden(self) -> bool:
        """Tell whether srun shows each task its own GPU alone, though NCCL connects several on this node."""
        several = self.backend == "nccl" and self.place.launcher == "srun" and self.place.local_world > 1
        return several and count_gpus("cuda") == 1

    def new_group(self, backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """Make a group: every thread or stream that communicates owns one. A collective."""
        group = dist.new_group(backend=backend or self.backend, timeout=timeout or self.timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def new_groups(self, parts: list[list[int]]) -> dist.ProcessGroup:
        """Make a group for each of the `parts` that the ranks fall into; return this rank's. A collective."""
        own, _ = dist.new_subgroups_by_enumeration(parts, timeout=self.timeout, backend=self.backend)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def ranks_per_node(self) -> int:
        """Return how many ranks the launcher started on each node.

        Raises:
            ConfigError: not as many on each node, or not node by node.
        """
        places = self.gather([self.place.local_rank, self.place.local_world])
        per_node = places[0][1]
        for rank, place in enumerate(places):
            if place != [rank % per_node, per_node]:
                raise ConfigError(
                    f"callbacks.hierarchical: rank {rank} is number {place[0]} of {place[1]} on its node, rank 0's has "
                    f"{per_node}; start as many on each node, node by node, or leave hierarchical out"
                )
        return per_node

    def agree(self, values: tuple[int, ...]) -> Callable[[], tuple[int, ...]]:
        """Start summing `values` over ranks, and return a function that waits for the sums.

        The sum runs beside the caller. Below `RING` ranks, gloo's thread takes 2 (N - 1) hops, one after the other.
        From there on, a thread of ours takes log2 N rounds. With 50 us a hop, 1,000 ranks take 0.5 ms instead of 100
        ms.
        """
        if self.world == 1:
            return lambda: values
        word = torch.tensor(values, dtype=torch.int64)
        if self.world > RING:
            rows = self.agree_thread.submit(all_gather, word, self.agree_group)
            return lambda: tuple(rows.result().sum(0).tolist())
        work = dist.all_reduce(word, group=self.host, async_op=True)
        assert work is not None

        def sums() -> tuple[int, ...]:
            work.wait()
            return tuple(word.tolist())

        return sums

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Gather a JSON value of each rank, in the order of ranks, on all of them."""
        if self.world == 1:
            return [value]
        group = group or self.host
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = all_gather(torch.tensor([data.numel()]), group).flatten().tolist()
        rows = all_gather(torch.nn.functional.pad(data, (0, max(sizes) - data.numel())), group)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def each(self, value: Any) -> list[Any]:
        """Gather as `gather` does, however long it takes: rank 0 may have a corpus to prepare."""
        return self.gather(value, self.patient if self.world > 1 else None)

    def first(self, value: Any) -> Any:
        """Return rank 0's JSON value on all ranks, however long it takes."""
        return self.each(value if self.rank == 0 else None)[0]

    def share_buffers(self, module: nn.Module, but: Container[str] = ()) -> None:
        """Copy rank 0's buffers, `but` those of these names, to all ranks, as DDP does before a forward pass."""
        buffers = [buffer for name, buffer in module.named_buffers() if name not in but]
        if self.world > 1 and buffers:
            assert dist.group.WORLD is not None
            dist._broadcast_coalesced(dist.group.WORLD, buffers, 250 << 20, 0)

    def note_failure(self, kind: type[BaseException] | None, logs: Path) -> None:
        """Write the last collectives of this rank into the folder `logs` if one may have failed.

        torch's flight recorder keeps collectives. If ranks have gone apart, the last one of some rank differs.
        """
        if self.world > 1 and kind and issubclass(kind, RuntimeError):
            with suppress(OSError, ValueError, KeyError):  # it would hide what has failed
                torchs: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
                traces = [json.loads(getattr(torchs, name, bytes)() or "{}") for name in RECORDERS]
                entries = sorted(
                    chain(*(trace.get("entries", ()) for trace in traces)), key=itemgetter("time_created_ns")
                )
                noted = json.dumps({**traces[0], "entries": entries})
                (logs / f"collectives-rank{self.rank}.json").write_text(noted)

    def leave(self) -> None:
        """End the groups when all ranks do. A collective.

        Rank 0 may still write, and a launcher may end all ranks with the first that ends.
        """
        if self.world > 1 and dist.is_initialized():
            self.first(None)
        self.close()

    def close(self) -> None:
        """End the groups at once: peers that wait for this rank hear of it."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def all_gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather (n,) of each rank of `group`, on the host -> (ranks, n), on all of them.

    gloo's own takes N - 1 hops, one after the other. Above `RING` ranks, ceil(log2 N) rounds double what each has, for
    any N (Bruck et al. 1997, the concatenation algorithm); as many bytes arrive.
    """
    rank, world, have = group.rank(), group.size(), 1
    rows = own.new_empty(world, own.numel())
    if world <= RING:
        dist.all_gather(list(rows), own, group)
        return rows
    rows[0] = own
    while have < world:  # row i is rank (rank + i)'s
        count = min(have, world - have)
        coming = dist.irecv(rows[have : have + count], group=group, group_src=(rank + have) % world)
        dist.send(rows[:count], group=group, group_dst=(rank - have) % world)
        assert coming is not None
        coming.wait()
        have += count
    return rows.roll(rank, 0)
