"""The recipe, a user's part: a model, its data, its loss. No base class, no registry, no import of Echelon."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from numpy.random import Generator
from torch import Tensor, nn
from torch.utils.data import Dataset

Data = str | Path | list[str] | list[Path] | dict[str, float] | Dataset[Any] | Iterable[Any]


class Recipe(Protocol):
    """The three methods that every recipe has. Those below, in `Optional`, are called where a recipe has them."""

    def model(self) -> nn.Module:
        """Make a model on the CPU; the global seed is set before the call."""
        ...

    def data(self, split: str) -> Data:
        """Return the data of `split` ("train" or "val"), the same on every rank. There are four kinds:

        - tar shards in WebDataset format, plain or compressed: a path, a glob pattern, a URL (http, https, s3, gs), or
          a list of these. `pipe:PROGRAM ARGUMENTS` needs data.allow_pipe=true. A sample is a dict of members.
        - a dict of such shards and their weights: a mixture. An epoch has as many samples as there are in all.
          Validation walks each sample once, whatever its weight.
        - a map-style torch `Dataset`. A checkpoint refuses other data by the class's name and the length. An attribute
          `fingerprint: str` of the dataset takes the place of the name, and should change with the content.
        - any iterable of batches, of this rank, walked again when it ends. A generator for "train" must never end; one
          for "val" is refused. A batch for "train" is a micro-batch, with as many samples in its first tensor, unless
          the recipe has a `weight`. A resume replays the iterable from its start.

        An iterable may draw from torch, which is seeded from (seed, rank, batch number) before each batch. It may draw
        from `random` and NumPy if nothing else in the process does. It finds its rank by `torch.distributed.get_rank()`
        if `torch.distributed.is_initialized()`, here or while it is walked. Else there is one rank, or none yet.

        The method is called once before any rank starts, so it is the place to prepare files (under a lock). Before
        each call, torch, `random` and NumPy are seeded, alike for both splits: `random_split` cuts at the same places
        both times.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the `weight(batch)` items of `batch`, a tensor of one number with its gradient.

        Call `model(...)` itself, once: on several ranks it is wrapped, and has no other methods of yours. A
        micro-batch of weight 0 contributes nothing, whatever its loss. On several ranks a rehearsal calls `loss` two
        times or more on the first micro-batch, before step 1: a side effect counts these calls, too.
        """
        ...


class Optional(Protocol):
    """Optional parts of a recipe; never inherited, here for reading and for types."""

    tokens_per_sample: int  # for perf/tokens_per_s
    flops_per_sample: float  # forward and backward, for perf/mfu
    paths: tuple[str, ...]  # arguments that name files or folders: trainer.tools.export takes these from its command

    def weight(self, batch: Any) -> int:
        """Count the items that the loss averages over, on the CPU batch. Default: samples."""
        ...

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        """Return (sum, count) per name over `batch`, for validation. Default: the loss as `loss`.

        Count 0 is left out. Two micro-batches are tried before step 1.
        """
        ...

    def transform(self, sample: Any, rng: Generator) -> Any:
        """Make a sample what the model wants, in a data worker, after `data.map`.

        `rng` is keyed by (seed, epoch, sample).
        """
        ...

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch from samples. Default: torch's `default_collate`."""
        ...

    def summary(self) -> dict[str, float]:
        """Return numbers about the data or the task, for summary.json and beside the final metrics.

        Rank 0 calls it before step 1 and at the end.
        """
        ...

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model for use elsewhere into `folder`; rank 0 calls it after training."""
        ...
