"""The model in torch's DistributedDataParallel, with the Reduce chain as its communication hook."""

import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.checkpoint.serialize import optimizer_state
from trainer.comm.bucket import Bucket
from trainer.comm.phases import Phase, ends_with_wait, switch
from trainer.comm.reduce import Background, Reduce
from trainer.errors import ConfigError
from trainer.parallel.batch_norm import refuse_no_items
from trainer.parallel.sparse import sparse_weights
from trainer.parallel.strategy import SingleDevice, own_names, zero_loss
from trainer.parallel.warmup import constants, integer_buffers


class DDP(SingleDevice):
    """A copy of the model on each rank (Li et al. 2020, arXiv:2006.15704).

    `arguments` are those of DistributedDataParallel. Without `reduce`, its own reducer in C++ averages gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        world: int,
        device: torch.device,
        arguments: dict[str, Any],
        reduce: Reduce | None,
        step: Callable[[], int],
    ) -> None:
        super().__init__(module)
        refuse_debug()
        self.device, self.arguments = device, arguments
        self.data_rank, self.data_world, self.replicas = rank, world, dist.group.WORLD
        self.reduce, self.step, self.background = reduce, step, Background(device) if reduce else None
        # DDP's constructor would load this module, and the import would hold DDP in a cycle of frames.
        importlib.import_module("torch._dynamo")
        self.lay_out({})

    def lay_out(self, arguments: dict[str, Any]) -> None:
        """Wrap the model again, after dropping the previous DDP with its buckets and its hooks on parameters.

        Only the first DDP broadcasts rank 0's weights, because they are equal afterwards.
        """
        self.arguments |= arguments
        first = self.model is self.module
        self.unwrap()
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        self.model = DistributedDataParallel(self.module, device_ids=device_ids, init_sync=first, **self.arguments)
        if self.reduce:
            self.model.register_comm_hook(None, self._reduce_bucket)

    def unwrap(self) -> None:
        wrapped, self.model = weakref.ref(self.model), self.module
        if wrapped() not in (None, self.module):
            gc.collect()  # it is in a reference cycle, and its buckets hold memory for all gradients

    @property
    def bucket_bytes(self) -> int:
        return 0 if self.arguments["gradient_as_bucket_view"] else sum(p.nbytes for p in self.parameters)

    def sync_gradients(self, on: bool) -> None:
        self.syncing = on
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = on

    def share_buffers(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            if self.model._check_sync_bufs_pre_fwd():
                self.model._sync_buffers()
            self.model.require_forward_param_sync = False  # until the next pass that reduces

    def reduce_gradients(self) -> None:
        """Reduce the accumulated gradients, using a backward pass that adds zero to each."""
        if isinstance(self.model, DistributedDataParallel):
            self.sync_gradients(True)
            zero = zero_loss(self.parameters, unused=False)
            self.model._pre_forward(zero)
            passed: Any = self.model._post_forward(zero)
            switch(Phase.BACKWARD)
            ends_with_wait(passed)
            passed.backward()

    def zero_loss(self, run: Callable[[], Tensor]) -> Tensor:
        refuse_no_items(self.module)
        run()
        unused = self.arguments["find_unused_parameters"]
        return zero_loss(self.parameters, unused, sparse_weights(self.module).values())

    def warm_up(self, run_pass: Callable[[], None]) -> None:
        """Run two passes, because DDP rebuilds its buckets after the first; with a static graph, run three."""
        before = integer_buffers(self.module)
        for _ in range(3 if self.arguments["static_graph"] else 2):
            run_pass()
        self.constant_buffers = constants(self.module, before, self.device)
        if self.constant_buffers and isinstance(self.model, DistributedDataParallel):
            self.model.parameters_to_ignore |= self.constant_buffers
            self.model._assign_modules_buffers()

    def buckets(self) -> list[list[int]]:
        """Return DDP's buckets, which determine the order of summation."""
        if not isinstance(self.model, DistributedDataParallel):
            return []
        assert self.model.logger is not None
        self.model.logger.set_runtime_stats_and_log()  # otherwise DDP does so only in the next forward pass
        # Missing with find_unused_parameters, which keeps the first layout.
        text = self.model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
        names = (name for name, p in self.module.named_parameters() if p.requires_grad)
        # DDP's indices exclude the parameters that it ignores.
        known = [i for i, name in enumerate(names) if name not in self.model.parameters_to_ignore]
        return [[known[int(i)] for i in bucket.split()] for bucket in text.split(",") if bucket.strip()]

    def save(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of `owned`. Rank 0 saves everything else."""
        if self.owned is None:
            return {}
        own, states = own_names(self.module, self.owned), optimizer_state(optimizer, self.module).items()
        return {"optimizer": {name: state for name, state in states if name in own}}

    def _reduce_bucket(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        assert self.background and self.reduce
        done = self.background.submit(self.reduce, bucket.buffer(), Bucket.of(bucket.parameters(), self.step()))
        # DDP takes an exception in a future for its value, but raises one from a `then`.
        return done.then(lambda done: done.value())


def refuse_debug() -> None:
    """Refuse a debug variable with which torch 2.13's DistributedDataParallel crashes on gloo (segmentation fault)."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL and dist.get_backend() == "gloo":
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch crashes with it on gloo; give INFO, or unset it (Echelon itself "
            "names a rank whose last collective differs)"
        )
