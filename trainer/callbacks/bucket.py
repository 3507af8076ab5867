"""Sets the size of the buckets in which DDP reduces gradients (Li et al. 2020, arXiv:2006.15704)."""

from torch import nn

from trainer.callback import Callback, Role
from trainer.errors import ConfigError


class Bucket(Callback):
    """Small buckets start early but pay each collective's latency; one large bucket overlaps with nothing. The order of
    summation depends on it, so results equal plain training's to rounding.

    Args:
        mib: Size of a bucket in MiB; DDP's own default is 25, with a first bucket of 1.
    """

    role = Role.SHARD
    communicates = True

    def __init__(self, mib: float = 25.0) -> None:
        if mib <= 0:
            raise ConfigError(f"callbacks.bucket.mib={mib}: must be more than 0; 1 to 100 is usual")
        self.mib = mib

    def wrap_model(self, trainer, model: nn.Module) -> nn.Module:
        trainer.ddp["bucket_cap_mb"] = self.mib
        return model
