"""The sizes of buckets that `bucket` sets."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.cost.setup import Cost, Setup


@dataclass(frozen=True)
class BucketCost(Cost):
    """Buckets have these sizes in MiB, the last for all further ones."""

    mibs: tuple[float, ...] = ()

    def bucket_mibs(self, setup: Setup) -> Sequence[float]:
        return self.mibs
