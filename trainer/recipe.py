"""The recipe is the user's part: a model, data, a loss. It needs no base class, no registry, no import of Echelon."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.random import Generator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

Data = str | Path | list[str] | list[Path] | dict[str, float] | Dataset[Any] | Iterable[Any] | dict[str, Any]


class Recipe(Protocol):
    """The three methods that every recipe has. `Optional` lists the others."""

    def model(self) -> nn.Module:
        """Return a model on the CPU. torch is seeded before the call."""
        ...

    def data(self, split: str) -> Data:
        """Return the data of `split`, the same on every rank.

        `split` is "train", "val", or any word that `evaluate` or `predict` is called with. There are six kinds of data:

        - Tar shards in WebDataset format, plain or compressed: a path, a glob pattern, a URL (http, https, s3, gs), or
          a list of these. `pipe:PROGRAM ARGUMENTS` needs data.allow_pipe=true. A sample is a dict of members.
        - A mixture: a dict of such shards and their weights. An epoch has as many samples as all shards together.
          Validation walks each sample once, whatever its weight.
        - A map-style torch `Dataset`. A resume refuses a dataset of another class or length. An attribute
          `fingerprint: str` of the dataset replaces the class's name, and should change with the content. An attribute
          `validation_batch: int` is the samples of a batch in validation. Default: the micro-batch.
        - An iterable of this rank's batches, walked again when it ends. A generator for "train" must never end; a
          generator for "val" is refused. A batch for "train" is a micro-batch: its first tensor has as many samples,
          unless the recipe has a `weight`. A resume replays the iterable from its start.
        - A torch `DataLoader`, an iterable of batches. Ranks share its samples if its sampler is torch's own.
        - A stream of samples: Hugging Face's streaming data set, or an iterable whose attribute `yields_samples` is
          true. It is the same on every rank. Echelon splits it over the ranks, calls `transform`, and makes batches.
          Data workers do not read it. A resume reads the stream from its start.

        For "val", a dict of name -> data set validates on each. Its metrics are `val/NAME/METRIC`.

        An iterable may draw from torch, which is seeded from (seed, rank, batch number) before each batch. Drawing from
        `random` and NumPy is safe if nothing else in the process does so. `torch.distributed.get_rank()` is this rank,
        here and while an iterable is walked, if `torch.distributed.is_initialized()`. Else there is one rank, or none
        yet.

        The first call comes before any rank starts, so files can be prepared here (under a lock). Before each call,
        torch, `random` and NumPy are seeded, alike for both splits: `random_split` cuts both times at the same places.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor | dict[str, Any]:
        """Return the mean loss over the `weight(batch)` items of `batch`, a tensor of one number with its gradient.

        Or return a dict with this tensor as `loss`, and other losses by name, which are logged as `train/NAME`.

        Call `model(...)` itself, once: on several ranks the model is wrapped, and its other methods are hidden. A
        micro-batch of weight 0 contributes nothing, whatever its loss. On several ranks a rehearsal calls `loss` two
        times or more on the first micro-batch, before step 1. A side effect counts these calls, too.
        """
        ...


class Optional(Protocol):
    """The optional parts of a recipe, here for reading and for types. No recipe inherits from this class."""

    tokens_per_sample: int  # for perf/tokens_per_s
    flops_per_sample: float  # forward and backward, for perf/mfu
    paths: tuple[str, ...]  # arguments that name files or folders; an export takes them from its command alone
    # Functions (".jpg", bytes) -> value that decode members of shards, after those of `data.decoders`.
    decoders: Sequence[Callable[[str, bytes], Any]]
    targets: tuple[str, ...]  # arguments that name classes; their packages must be in trainer.allow_targets

    def prepare_files(self, here: bool) -> None:
        """Prepare files once per node, before the first `data`. Every rank calls this; `here` is true on one of a node.

        Ranks go in turns, as in `data`, and torch, `random` and NumPy are seeded before. If Echelon starts the ranks,
        it has called this before, so no rank of that node prepares again. Tools with one process do not call it.
        """
        ...

    def weight(self, batch: Any) -> int:
        """Return the number of items that the loss averages over. `batch` is on the CPU. Default: the samples."""
        ...

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        """Return name -> (sum, count) over `batch`, for validation. Default: the loss, named `loss`.

        The model is in eval mode, and there are no gradients.

        A count of 0 leaves the metric out. A value may be an object of torchmetrics that this method has updated. The
        end of a validation computes it over all ranks, and resets it. Two micro-batches are tried before step 1.
        """
        ...

    def validation_end(self, model: nn.Module) -> dict[str, tuple[Tensor, int]]:
        """Return further metrics, as `metrics` does, after all batches of a validation data set.

        Called once on each rank, also on one that had no batch, so it may communicate. `metrics` has kept what this
        method needs, in attributes of the recipe or of modules; forget it here. With `shard` of stage 3 and `pipeline`
        a rank may repeat its last batch. Then its numbers, tensors, lists, sets and dicts are put back.
        """
        ...

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return predictions for `batch`: a tensor (samples, ...), a list of plain values, or a dict of these by name.

        For `Trainer.predict` and `echelon predict`. The model is in eval mode, and there are no gradients.
        """
        ...

    def media(self, model: nn.Module, batch: Any) -> dict[str, str | Tensor]:
        """Return name -> a text, an image (C, H, W) or values (N,) for a histogram, for the loggers.

        Called on each rank's first batch of a validation; rank 0's are logged. An image has 1, 3 or 4 channels, in
        uint8 or in floats from 0 to 1.
        """
        ...

    def transform(self, sample: Any, rng: Generator) -> Any:
        """Return a sample as the model wants it. A data worker calls this after `data.map`.

        `rng` is keyed by (seed, epoch, sample).
        """
        ...

    def val_transform(self, sample: Any, rng: Generator) -> Any:
        """Return a sample of data that is not trained on: for validation, `evaluate` and `predict`. Default: transform.

        So that `transform` may augment. `rng` is keyed as there.
        """
        ...

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of these samples. Default: torch's `default_collate`."""
        ...

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated modules of `model`, in order: each can be recomputed, compiled, sharded or staged alone.

        Default: the members of the longest `nn.ModuleList`.
        """
        ...

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return settings for some of the parameters, as torch's optimizers take them: `params`, and what they have.

        Settings are the optimizer's own, and `lr_scale`, `freeze` and `held`. With `held` the group's frozen parameters
        stay in the optimizer, so that they train once they are unfrozen. `optimizer.groups` of the config goes first.
        """
        ...

    def optimizer(self, groups: Iterable[dict[str, Any]]) -> Optimizer:
        """Return the recipe's own optimizer of these groups, for `optimizer=recipe`.

        A `schedule` of the recipe, an object with `resolve` as in trainer/optim/schedule.py, is for `schedule=recipe`.
        """
        ...

    def summary(self) -> dict[str, float]:
        """Return numbers about the data or the task, for summary.json, alongside the final metrics.

        Rank 0 calls this before step 1 and at the end.
        """
        ...

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model into `folder`, for use elsewhere. Rank 0 calls this after training."""
        ...
