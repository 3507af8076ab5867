"""The area under the ROC curve (AUC), exact over all samples of all ranks."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class AUC:
    """The share of the pairs of a positive and a negative in which the positive has the higher score; ties are a half.

    It has the methods of torchmetrics' objects, so a recipe's `metrics` may return it. Each rank keeps its scores, 5
    bytes a sample. `compute` brings those of all ranks to each.

    Attributes:
        process_group: The ranks whose samples count; None: all.
    """

    process_group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all samples."""
        self.scores: list[np.ndarray] = []
        self.positive: list[np.ndarray] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add the samples of a batch: any scores, and labels that are 0 or 1. Waits for the device."""
        self.scores.append(scores.float().cpu().numpy())
        self.positive.append(labels.cpu().numpy() > 0.5)

    def compute(self) -> Tensor:
        """Return the AUC; NaN without both labels, or with a score that is NaN. A collective."""
        own = (np.concatenate([np.empty(0, np.float32), *self.scores]), np.concatenate([[], *self.positive]) > 0)
        ranks = [own]
        if dist.is_initialized():
            ranks = [own] * dist.get_world_size(self.process_group)
            dist.all_gather_object(ranks, own, self.process_group)
        scores, positive = map(np.concatenate, zip(*ranks, strict=True))
        return torch.tensor(auc(scores, positive), dtype=torch.float64)


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the AUC by counting pairs: exact up to the last division."""
    order = np.argsort(scores)
    scores, positive = scores[order], positive[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)[: len(scores)])  # of each score
    positives = np.diff(np.cumsum(positive)[last], prepend=0)
    negatives = np.diff(last, prepend=-1) - positives
    pairs = int(positives.sum()) * int(negatives.sum())
    if not pairs or np.isnan(scores[-1]):
        return float("nan")
    below = np.cumsum(negatives) - negatives
    return float((positives * (2 * below + negatives)).sum() / 2 / pairs)
