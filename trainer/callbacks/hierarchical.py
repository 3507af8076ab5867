"""Reduces in two levels, inside each node first, so that a node's ranks share the bytes that cross the network."""

from collections.abc import Iterable

from trainer.annotated import PositiveInt
from trainer.callback import Callback, Role, Symptom
from trainer.comm.mesh import Mesh
from trainer.comm.reduce import AllReduce, Reduce
from trainer.comm.two_level import TwoLevel
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.errors import ConfigError
from trainer.log import log


class Hierarchical(Callback):
    """Reduces by a reduce-scatter inside the node, an all-reduce across nodes, and an all-gather inside.

    Jia et al. 2018 (arXiv:1807.11205) have an all-reduce inside and a leader across. Exact up to rounding.
    """

    role = Role.REDUCE
    remedies = {Symptom.NODES: [{}]}
    communicates = True
    provides = frozenset({"hierarchical"})

    def __init__(self, ranks_per_node: PositiveInt | None = None) -> None:
        self.ranks_per_node = ranks_per_node

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        return [Variant({})] if at.two_levels else []

    def cost(self) -> Cost:
        return Cost(two_levels=True)

    def wrap_reduce(self, trainer, reduce: Reduce) -> "TwoLevel":
        world, per_node = trainer.world, self.ranks_per_node or trainer.ranks.ranks_per_node("hierarchical")
        if world % per_node:
            raise ConfigError(
                f"callbacks.hierarchical.ranks_per_node={per_node}: does not divide the {world} ranks; "
                "start the same number on each node, or leave hierarchical out"
            )
        if per_node in (1, world):
            log.info("hierarchical: %d ranks on %d node(s) make one level only", world, world // per_node)
        mesh = Mesh(trainer.ranks, node=world // per_node, local=per_node)
        return TwoLevel(mesh.groups["local"], AllReduce(mesh.groups["node"]))
