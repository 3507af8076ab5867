"""The blocks and parameters of each stage of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layout:
    """The blocks of each stage, and the rank of the pipeline that runs the stage."""

    starts: tuple[int, ...]  # the first block of each stage
    blocks: int  # their number
    ranks: int  # per pipeline; each has one stage or two
    v: bool = False  # second stages are in reverse order of ranks (Qi et al. 2024, arXiv:2401.10241)

    @property
    def stages(self) -> int:
        return len(self.starts)

    def rank(self, stage: int) -> int:
        return self.stages - 1 - stage if self.v and stage >= self.ranks else stage % self.ranks

    def of(self, rank: int) -> list[int]:
        """Return the stages of the rank, in order."""
        return [stage for stage in range(self.stages) if self.rank(stage) == rank]

    def range(self, stage: int) -> tuple[int, int]:
        """Return the first block of the stage, and the one after its last."""
        return self.starts[stage], (*self.starts, self.blocks)[stage + 1]

    def stage(self, block: int) -> int:
        return sum(start <= block for start in self.starts) - 1


def homes(model: nn.Module, blocks: Sequence[nn.Module], layout: Layout) -> dict[str, int]:
    """Return the stage of each module, by name.

    A module outside of all blocks belongs to the first stage if the model defines it before the blocks, else to the
    last.
    """
    own = {id(module): layout.stage(i) for i, block in enumerate(blocks) for module in block.modules()}
    found: dict[str, int] = {}
    seen = False
    for name, module in model.named_modules(remove_duplicate=False):
        seen |= id(module) in own
        found[name] = own.get(id(module), layout.stages - 1 if seen else 0)
    return found


def holders(model: nn.Module, blocks: Sequence[nn.Module], layout: Layout) -> dict[str, list[int]]:
    """Return the stages that use each parameter, in order, by the parameter's first name.

    A tied parameter, which has several names, may belong to two stages.
    """
    home = homes(model, blocks, layout)
    names = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    found: dict[str, set[int]] = {name: set() for name, _ in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        found[names[id(p)]].add(home[name.rpartition(".")[0]])
    return {name: sorted(stages) for name, stages in found.items()}


def part_sums(model: nn.Module, blocks: Sequence[nn.Module], weigh: Callable[[nn.Parameter], float]) -> list[float]:
    """Sum `weigh` of each parameter over the part before the blocks, each block, and the part after them.

    A tied parameter may count in both the first and the last sum.
    """
    block_of = {id(p): i for i, block in enumerate(blocks, start=1) for p in block.parameters()}
    ends, sums = holders(model, blocks, Layout((0, 1), len(blocks), 2)), [0.0] * (len(blocks) + 2)
    for name, p in model.named_parameters():
        parts = [block_of[id(p)]] if id(p) in block_of else [-stage for stage in ends[name]]
        for part in parts:
            sums[part] += weigh(p)
    return sums
