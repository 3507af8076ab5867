"""Limits the activations of compiled blocks to a budget, using torch's partitioner of their graphs."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

LEAST = 1e-9  # smallest budget: at 0, torch's partitioner keeps only inputs, not even seeds


class SavingSeeds(CustomPartitionerFn):
    """Partitions a graph into forward and backward as torch does, but draws no random number twice.

    With a budget, torch 2.13 recomputes dropout's seeds, so the backward pass has other masks. Seeds marked here are
    saved, 8 bytes each, and masks are computed from them. With eager's random numbers, masks are saved.
    """

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        for node in gm.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Return the key of this partitioner in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


def set_budget(budget: float, stack: ExitStack) -> None:
    """Let graphs that Inductor compiles keep this fraction of their activations, until `stack` closes.

    0 keeps only a graph's inputs, 1 everything that saves time (torch's `activation_memory_budget`).
    """
    stack.enter_context(functorch.patch(activation_memory_budget=max(budget, LEAST)))
    stack.enter_context(inductor.patch(custom_partitioner_fn=SavingSeeds()))
