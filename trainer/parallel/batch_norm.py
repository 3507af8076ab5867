"""BatchNorm over the samples of all ranks, by torch's SyncBatchNorm."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import ConfigError, DataError
from trainer.log import log

KEY = "trainer.sync_batch_norm=true"


def across_ranks(model: nn.Module, world: int, device: torch.device) -> nn.Module:
    """Return the model with each BatchNorm as a SyncBatchNorm of the same parameters, buffers and names.

    In training, a forward pass gathers mean, variance and count of each layer from all ranks, and a backward pass sums
    two vectors: 4 C + 1 numbers for C channels. In evaluation nothing is sent. One rank keeps its BatchNorm.

    Raises:
        ConfigError: The device is a CPU, for which torch has no SyncBatchNorm, or the model has no BatchNorm.
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
    """Refuse a micro-batch of weight 0: its pass has no backward, for which other ranks' SyncBatchNorm would wait.

    Raises:
        DataError: The model has a SyncBatchNorm.
    """
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise DataError(
            f"{KEY}: a micro-batch has weight 0, and other ranks would wait for its BatchNorm; set "
            "trainer.sync_batch_norm=false, or give every micro-batch a weight"
        )
