"""The part of Lightning's Strategy that a LightningModule may use, as self.trainer.strategy."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from recipes.lightning.honoured import MANUAL
from trainer.errors import ConfigError

GIVEN = ("all_gather", "barrier", "broadcast", "global_rank", "is_global_zero", "local_rank", "model", "reduce")
GIVEN += ("root_device", "world_size")


def is_json(value: Any) -> bool:
    """Return whether a value stays as it is if it is sent as JSON: a tuple would come back as a list."""
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


class NoSuchAttribute(ConfigError, AttributeError):
    """An attribute of Lightning's that Echelon lacks; an AttributeError, so that `hasattr` works."""


class AttachedOptimizer:
    """The run's optimizer, as `self.optimizers()` gives it: also as the attribute `optimizer`, as in Lightning."""

    def __init__(self, optimizer: Any) -> None:
        vars(self)["optimizer"] = optimizer

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] for `isinstance`
        return type(vars(self)["optimizer"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "toggle_model":
            raise ConfigError(f"self.optimizers().{name}(): {MANUAL}")
        return getattr(vars(self)["optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["optimizer"], name, value)


class AttachedStrategy:
    """The object that a module finds as `self.trainer.strategy`. Its methods are collectives of all ranks."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.wrapped: list[Any] = []  # optimizers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoSuchAttribute(
            f"self.trainer.strategy.{name}: the layout is Echelon's; leave it out, or use one of {', '.join(GIVEN)}"
        )

    @property
    def model(self) -> Any:
        return self.view.model

    @property
    def root_device(self) -> torch.device:
        return self.view.run.device

    @property
    def global_rank(self) -> int:
        return self.view.global_rank

    @property
    def local_rank(self) -> int:
        return self.view.local_rank

    @property
    def world_size(self) -> int:
        return self.view.world_size

    @property
    def is_global_zero(self) -> bool:
        return self.view.is_global_zero

    @property
    def _lightning_optimizers(self) -> list[Any]:
        if [each.optimizer for each in self.wrapped] != self.view.optimizers:
            self.wrapped = [AttachedOptimizer(each) for each in self.view.optimizers]
        return self.wrapped

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, (world, ...); on one rank the tensor itself."""
        if self.world_size == 1:
            return tensor
        if sync_grads:
            return torch.stack(all_gather(tensor))
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(found, tensor.contiguous())
        return torch.stack(found)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """Return the mean or the sum over ranks; a value that is no tensor as it is."""
        if self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        if str(reduce_op).lower() not in ("mean", "avg", "sum"):
            raise ConfigError(f"self.trainer.strategy.reduce(reduce_op={reduce_op!r}): must be 'mean' or 'sum'")
        total = tensor.clone()
        dist.all_reduce(total)
        return total if str(reduce_op).lower() == "sum" else total / self.world_size

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s JSON value or tensor on every rank. Others would have to be unpickled.

        Raises:
            ConfigError: The object is neither; the rank `src` raises.
        """
        if self.world_size == 1:
            return obj
        sends, tensor = self.global_rank == src, isinstance(obj, Tensor)
        if sends and not tensor and not is_json(obj):
            raise ConfigError(
                f"self.trainer.strategy.broadcast({type(obj).__name__}): must be a tensor or made of numbers, strings, "
                f"lists and dicts with strings as keys; send such parts of it"
            )
        said = [str(obj.dtype).removeprefix("torch."), list(obj.shape)] if sends and tensor else None
        said, value = self.view.run.ranks.gather([said, None if tensor else obj] if sends else None)[src]
        if said is None:
            return value
        dtype, shape = said
        like = {"dtype": getattr(torch, dtype), "device": self.root_device}
        sent = obj.detach().to(self.root_device).contiguous() if sends else torch.empty(shape, **like)
        dist.broadcast(sent, src)
        return sent

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()
