"""BatchNorm over all ranks' samples with torch's SyncBatchNorm, and running statistics for averaged weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import ConfigError, DataError
from trainer.log import log

KEY = "trainer.sync_batch_norm=true"


def across_ranks(model: nn.Module, world: int, device: torch.device) -> nn.Module:
    """Replace each BatchNorm with a SyncBatchNorm of the same parameters, buffers and names.

    In training, a layer gathers its mean, variance and count in the forward pass, and sums two vectors in the backward
    pass: 4 C + 1 numbers for C channels. Nothing is sent in evaluation. On one rank the model is unchanged.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise ConfigError(f"{KEY}: the model has no BatchNorm; leave it out")
    if world == 1:
        log.info("one rank, whose BatchNorm sees all samples: trainer.sync_batch_norm does nothing")
        return model
    if device.type == "cpu":
        raise ConfigError(f"{KEY}: torch has no SyncBatchNorm for the CPU; train on GPUs, or set it to false")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def refuse_no_items(model: nn.Module) -> None:
    """Refuse a micro-batch of weight 0 if the model has a SyncBatchNorm, as other ranks would wait for it."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise DataError(
            f"{KEY}: a micro-batch has weight 0, and other ranks would wait for its BatchNorm; set "
            "trainer.sync_batch_norm=false, or give every micro-batch a weight"
        )


def layers_with_statistics(model: nn.Module) -> list[_BatchNorm]:
    """List the BatchNorm layers whose running statistics follow the training data, which excludes frozen ones."""
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return [layer for layer in layers if layer.training and layer.running_mean is not None]


def normalises_by_batch(model: nn.Module) -> bool:
    """Return whether a BatchNorm normalises by its micro-batch, so that the loss depends on the split."""
    layers = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return any(layer.training or layer.running_mean is None for layer in layers)


def statistics(layer: _BatchNorm) -> list[Tensor]:
    """List the mean, the variance and the count of batches."""
    assert layer.running_mean is not None and layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return [layer.running_mean, layer.running_var, layer.num_batches_tracked]


@contextmanager
def cumulative(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """Recompute running statistics in the passes inside, with equal weight per batch, as torch's `update_bn` does."""
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


@torch.no_grad()
def average_statistics(layers: Sequence[_BatchNorm], group: dist.ProcessGroup | None) -> None:
    """Average the statistics of `cumulative` over the ranks of `group`, with equal weight for each batch. A collective.

    Up to rounding, the result equals that of one rank that sees all batches. `group` is None on a single rank.
    """
    if group is None:
        return
    tensors = [statistics(layer) for layer in layers]
    sums = [(torch.stack([mean, var]).double() * count).flatten() for mean, var, count in tensors]
    flat = torch.cat([*sums, torch.stack([count for *_, count in tensors]).double()])
    dist.all_reduce(flat, group=group)
    *sums, counts = flat.split([*(len(each) for each in sums), len(tensors)])
    for (mean, var, count), both, total in zip(tensors, sums, counts, strict=True):
        if total > 0:  # otherwise no pass has run the layer
            mean.copy_(both[: len(mean)] / total)
            var.copy_(both[len(mean) :] / total)
        count.copy_(total)
