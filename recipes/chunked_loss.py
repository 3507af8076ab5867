"""Cross-entropy over a large vocabulary, whose logits are in memory one part at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def cross_entropy(head: Callable[[Tensor], Tensor], rows: Tensor, labels: Tensor, chunks: int) -> Tensor:
    """Return the mean cross-entropy of `head(rows)` (N, V) against `labels` (N,), in nats.

    The backward pass computes the logits of a part again (Chen et al. 2016, arXiv:1604.06174). So N x V / `chunks`
    logits are in memory, and the head costs a third more. The sum is another one, so the last bits may differ.

    Args:
        head: From rows (n, H) to logits (n, V). It draws no random numbers.
        rows: (N, H).
        chunks: Parts of the rows; 1: nothing is computed twice.
    """
    if chunks == 1:
        return F.cross_entropy(head(rows), labels)

    def part(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(rows), labels, reduction="sum")

    parts = zip(rows.chunk(chunks), labels.chunk(chunks), strict=True)
    sums = [checkpoint(part, *own, use_reentrant=False, preserve_rng_state=False) for own in parts]
    return torch.stack(sums).sum() / len(labels)
