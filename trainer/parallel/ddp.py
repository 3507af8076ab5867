"""The model in torch's DistributedDataParallel, with the Reduce chain for its reducer."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from trainer.comm.bucket import Bucket
from trainer.comm.reduce import Background, Reduce

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def distribute(trainer: "Trainer") -> DistributedDataParallel:
    """The model as DDP lays it out by `trainer.ddp`, with the trainer's chain for its reducer where there is one."""
    device_ids = [trainer.device.index] if trainer.device.type == "cuda" else None
    model = DistributedDataParallel(trainer.module, device_ids=device_ids, **trainer.ddp)
    if trainer.reduce:
        model.register_comm_hook(None, comm_hook(trainer, trainer.reduce))
    return model


def comm_hook(trainer: "Trainer", reduce: Reduce) -> Callable[[None, dist.GradBucket], "Future[Tensor]"]:
    background = Background(trainer.device)

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        done = background.submit(reduce, bucket.buffer(), Bucket.of(bucket.parameters(), trainer.step))
        # DDP takes an exception that a future was given for its value; one in a `then` it raises.
        return done.then(lambda done: done.value())

    return hook


def buckets(model: nn.Module) -> list[list[int]]:
    """DDP's layout after the rehearsal, as indices of the trainer's parameters; it decides the order of summation."""
    if not isinstance(model, DistributedDataParallel):
        return []
    assert model.logger is not None
    model.logger.set_runtime_stats_and_log()  # DDP itself does so at the next forward pass only
    # Not there with find_unused_parameters, which keeps the first layout.
    text = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    names = (name for name, p in model.module.named_parameters() if p.requires_grad)
    known = [i for i, name in enumerate(names) if name not in model.parameters_to_ignore]  # DDP counts those only
    return [[known[int(i)] for i in bucket.split()] for bucket in text.split(",") if bucket.strip()]
