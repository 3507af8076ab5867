"""The ranks as a mesh with named dimensions: torch's DeviceMesh, with a process group along each dimension."""

from itertools import count
from math import prod

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.comm.ranks import Ranks

NUMBERS = count()  # DTensor's caches mix up equal meshes, and those of an earlier run have groups that have ended


class Mesh:
    """The ranks as a grid. Ranks along the last dimension are neighbours. Making a mesh is a collective.

    Attributes:
        sizes: Ranks along each dimension.
        place: This rank's index along each.
        line: The ranks of this rank's line along each, in order.
        groups: The process group of each of these lines. Groups are made in the order of the dimensions.
        host: All ranks, for what is on the host.
    """

    def __init__(self, ranks: Ranks, **sizes: int) -> None:
        """Make the groups.

        Args:
            sizes: Ranks along each dimension, by its name. Their product is the number of ranks.
        """
        assert prod(sizes.values()) == ranks.world, sizes
        if ranks.device.type == "cuda":
            torch.cuda.init()  # else torch would choose the device, by LOCAL_RANK
        self.grid, self.sizes, self.host = torch.arange(ranks.world).view(*sizes.values()), sizes, ranks.host
        self.devices = init_device_mesh(
            ranks.device.type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(map(unique, sizes)),
            backend_override={i: (ranks.backend, limited(ranks)) for i in range(len(sizes))},
        )
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
    """Return the ranks of a group as a mesh of one dimension. It makes no group."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(unique(name),))


def forget_groups(mesh: DeviceMesh) -> None:
    """Drop the references to groups that are about to end. DTensor's caches keep meshes until the process ends."""
    getattr(getattr(mesh, "_root_mesh", None) or mesh, "_pg_registry", {}).clear()


def unique(name: str) -> str:
    return f"{name}{next(NUMBERS)}"


def limited(ranks: Ranks) -> Backend.Options:
    """Return options of a group that have the time limit of the others; torch's own default is another."""
    nccl = ranks.backend == "nccl"
    options: Backend.Options = dist.ProcessGroupNCCL.Options() if nccl else Backend.Options(ranks.backend)
    options._timeout = ranks.timeout
    return options
