"""Holds compiled blocks to a budget of activation bytes, by torch's partitioner of their graphs."""

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

LEAST = 1e-9  # of a budget: at 0, torch's partitioner keeps nothing but inputs, not even seeds


class SavingSeeds(CustomPartitionerFn):
    """Cuts a graph into its forward and backward pass as torch does, but draws no random number twice.

    With a budget of its own, torch 2.13 recomputes the seeds of dropout, so the backward pass has other masks. Marked
    seeds are saved, 8 bytes each, and masks are computed from them. With eager's random numbers, masks are saved.
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
    """Let the graphs that Inductor compiles keep this share of their activations, until `stack` is closed.

    Args:
        budget: From 0, a graph's inputs alone, to 1, all that saves time (torch's `activation_memory_budget`).
    """
    stack.enter_context(functorch.patch(activation_memory_budget=max(budget, LEAST)))
    stack.enter_context(inductor.patch(custom_partitioner_fn=SavingSeeds()))
