"""The ranks as a mesh with named dimensions: torch's DeviceMesh, with a process group along each dimension."""

from itertools import count
from math import prod

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.comm.ranks import Ranks

NUMBERS = count()  # makes meshes unequal: DTensor's caches would reuse an earlier run's mesh, whose groups have ended


class Mesh:
    """The ranks as a grid, in which neighbours are along the last dimension. Creating it is a collective."""

    def __init__(self, ranks: Ranks, **sizes: int) -> None:
        assert prod(sizes.values()) == ranks.world, sizes
        if ranks.device.type == "cuda":
            torch.cuda.init()  # otherwise torch would choose the device by LOCAL_RANK
        self.grid, self.sizes = torch.arange(ranks.world).view(*sizes.values()), sizes
        self.host = ranks.host  # of all ranks, for tensors on the host
        self.devices = init_device_mesh(
            ranks.device.type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(map(unique, sizes)),
            backend_override={i: (ranks.backend, limited(ranks)) for i in range(len(sizes))},
        )
        # By dimension: this rank's index, the ranks of its line in order, and the line's process group.
        self.place: dict[str, int] = dict(zip(sizes, self.devices.get_coordinate() or (), strict=True))
        self.line = {name: next(line for line in self.lines(name) if ranks.rank in line) for name in sizes}
        self.groups = dict(zip(sizes, self.devices.get_all_groups(), strict=True))

    def lines(self, name: str) -> list[list[int]]:
        """List the ranks of each line along a dimension."""
        return self.grid.movedim(list(self.sizes).index(name), -1).reshape(-1, self.sizes[name]).tolist()

    def along(self, name: str) -> DeviceMesh:
        """Return this rank's line along a dimension, for tensors that are sharded over it."""
        assert self.devices.mesh_dim_names
        return self.devices[self.devices.mesh_dim_names[list(self.sizes).index(name)]]


def line_of(group: dist.ProcessGroup, device: torch.device, name: str) -> DeviceMesh:
    """Return a one-dimensional mesh over an existing group."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(unique(name),))


def forget_groups(mesh: DeviceMesh) -> None:
    """Drop references to groups that are about to be destroyed, because DTensor's caches keep meshes alive."""
    getattr(getattr(mesh, "_root_mesh", None) or mesh, "_pg_registry", {}).clear()


def unique(name: str) -> str:
    return f"{name}{next(NUMBERS)}"


def limited(ranks: Ranks) -> Backend.Options:
    """Return group options with the run's timeout instead of torch's default."""
    nccl = ranks.backend == "nccl"
    options: Backend.Options = dist.ProcessGroupNCCL.Options() if nccl else Backend.Options(ranks.backend)
    options._timeout = ranks.timeout
    return options
