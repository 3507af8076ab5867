"""Sparse gradients, of embeddings with `sparse=True`, and the refusal of runs that can't carry them."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import ConfigError

# Callbacks with any of these take dense gradients; observers do with the first one only.
HOOKS = ("wrap_reduce", "distribute", "wrap_forward_backward", "wrap_optimizer", "on_before_optimizer_step")
ACCEPTING = ("SGD", "Adagrad", "SparseAdam")  # among torch's and our optimizers
PRECISIONS = ("fp32", "tf32", "bf16")


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients; for a sparse one, the values of its rows, in the same memory."""
    found: list[Tensor] = []
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # a row that was used twice has one value
            found.append(p.grad._values())
        elif p.grad is not None:
            found.append(p.grad)
    return found


def sparse_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights of embeddings with sparse gradients, by name."""
    return {
        f"{name}.weight": each.weight
        for name, each in module.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse and each.weight.requires_grad
    }


def refuse_sparse(
    module: nn.Module, optimizer: Optimizer, callbacks: Sequence[str], precision: str, nccl: bool
) -> None:
    """Refuse settings that can't carry sparse gradients, if an embedding of the model has them.

    `callbacks` names those that take dense gradients. `nccl` states whether ranks average gradients by NCCL.
    """
    sparse = sparse_weights(module)
    if not sparse:
        return
    if callbacks:
        found = f"callbacks.{callbacks[0]}", "leave it out"
    elif precision not in PRECISIONS:
        found = f"trainer.precision={precision}", f"use one of {', '.join(PRECISIONS)}"
    elif nccl:
        found = "trainer.backend=nccl", "use one rank"
    else:
        found = unfit(optimizer, [*sparse.values()])
    if found:
        setting, fix = found
        name = next(iter(sparse))
        raise ConfigError(f"{setting}: takes dense gradients, and {name} has sparse ones; {fix}, or sparse=False there")


def unfit(optimizer: Optimizer, sparse: Sequence[Tensor]) -> tuple[str, str] | None:
    """Return the setting and its fix if the optimizer can't step these parameters. A user's own is trusted."""
    kind, ids = type(optimizer), {id(p) for p in sparse}
    if kind.__module__.split(".")[0] not in ("torch", "trainer"):
        return None
    if kind.__name__ not in ACCEPTING:
        return f"optimizer={kind.__name__.lower()}", "use adagrad or sgd"
    for group in optimizer.param_groups:
        for key in ("momentum", "weight_decay"):
            if group.get(key) and any(id(p) in ids for p in group["params"]):
                return f"optimizer.{key}={group[key]}", f"set optimizer.{key}=0"
    return None
