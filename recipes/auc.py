"""The area under the ROC curve (AUC), exact over all samples of all ranks."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


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
        parts = zip(self.scores, self.positive, strict=True)
        rows = np.concatenate([np.empty((0, 2), np.float32), *(np.stack(part, 1) for part in parts)])
        if dist.is_initialized():
            rows = gather(torch.from_numpy(rows), self.process_group).numpy()
        return torch.tensor(auc(rows[:, 0], rows[:, 1] > 0), dtype=torch.float64)


def gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks, each of which has any number of rows (n, 2), on the host. A collective."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device), group)
    most = max(map(int, sizes))
    rows = [torch.empty(most, 2, device=device) for _ in range(world)]
    dist.all_gather(rows, F.pad(own, (0, 0, 0, most - len(own))).to(device), group)
    return torch.cat([each[: int(size)] for each, size in zip(rows, sizes, strict=True)]).cpu()


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
