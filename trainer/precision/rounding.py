"""Trains weights that are stored in bf16 only: each step rounds them stochastically."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.optim.probe import refuse_coupled
from trainer.rng import ROUNDING, mix

CHUNK = 1 << 24  # elements that have float32 copies at a time, unless a single parameter has more
# splitmix64 (Steele et al. 2014) in int64, whose products wrap around: multipliers, and shifts before each.
STRIDE, SCRAMBLES = 0xBF58476D1CE4E5B9, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def store_in_bf16(model: nn.Module) -> None:
    """Round float32 parameters in place to the nearest bf16, except those of batch norm."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    kept = {p for module in norms for p in module.parameters(recurse=False)}
    for name, p in model.named_parameters():
        if p in kept:
            continue
        if p.dtype not in (torch.float32, torch.bfloat16):
            kind = str(p.dtype).removeprefix("torch.")
            raise ConfigError(
                f"trainer.master_weights=false: {name} is {kind}, and a step rounds from float32 to bf16; give the "
                "model float32 parameters, or set trainer.master_weights=true"
            )
        p.data = p.data.to(torch.bfloat16)


def round_steps(optimizer: Optimizer, module: nn.Module, seed: int, step: Callable[[], int]) -> Optimizer:
    """Let the optimizer step float32 copies of its bf16 parameters, and round the results stochastically.

    Rounding to nearest would drop every update below half a unit in the last place (Gupta et al. 2015,
    arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192). Stochastic rounding preserves updates on average. Random
    numbers are keyed by (seed, step, parameter), so replicas stay equal, and a resume gives the same bits. Optimizer
    state and float32 parameters are not rounded.

    The optimizer must step each parameter independently. Memory: float32 copies of `CHUNK` elements of weights and
    gradients.

    Args:
        module: Numbers the parameters, in the order of their names.
        step: Returns the number of finished steps.
    """
    refuse_coupled(optimizer, "trainer.master_weights=false", by_parameter=True)
    numbers: dict[Tensor, int] = {p: i for i, p in enumerate(module.parameters())}
    # Without the hooks of a step, which run once around all chunks.
    plain: Any = type(optimizer).step.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]

    @torch.no_grad()
    def stepped(optimizer: Any) -> None:
        groups, done = optimizer.param_groups, step()
        try:
            for group in groups:
                for params in chunks([p for p in group["params"] if p.grad is not None]):
                    copies = step_copies(optimizer, group, params, plain)
                    for p, copy in zip(params, copies, strict=True):
                        exact = p.dtype == torch.float32
                        p.detach().copy_(copy if exact else rounded(copy, mix(seed, ROUNDING, done, numbers[p])))
        finally:
            optimizer.param_groups = groups

    made: Any = optimizer
    made.step = partial(Optimizer.profile_hook_step(stepped), optimizer)
    return made


def chunks(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split the parameters into groups of at most `CHUNK` elements, or single larger ones."""
    group: list[Tensor] = []
    for p in params:
        if group and sum(q.numel() for q in group) + p.numel() > CHUNK:
            yield group
            group = []
        group.append(p)
    if group:
        yield group


def step_copies(
    optimizer: Any, group: dict[str, Any], params: Sequence[Tensor], plain: Callable[[Any], Any]
) -> list[Tensor]:
    """Step float32 copies of the parameters with the parameters' state, and return the copies.

    Changing the dtype of `p.data` instead would drop the node that accumulates its gradient, and with it DDP's hook.
    """
    copies, state = [p.detach().to(torch.float32, copy=True) for p in params], optimizer.state
    for p, copy in zip(params, copies, strict=True):
        assert p.grad is not None
        copy.grad = p.grad.float()
        if p in state:
            state[copy] = state[p]
    optimizer.param_groups = [{**group, "params": copies}]
    plain(optimizer)
    for p, copy in zip(params, copies, strict=True):
        if copy in state:
            state[p] = state.pop(copy)
    return copies


def rounded(value: Tensor, key: int) -> Tensor:
    """Round float32 to one of the two nearest bf16 numbers, with probabilities that preserve the mean.

    bf16 is the upper half of float32. So 16 random bits are added, and the lower half is cut off. Infinity and NaN
    stay.
    """
    noise = random_words(key, value.numel(), value.device).view(value.shape)
    cut = ((value.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(value.isfinite(), cut, value).to(torch.bfloat16)


def random_words(key: int, count: int, device: torch.device) -> Tensor:
    """Return `count` 16-bit numbers as int32 (count,): the words of `rng.mix_each`, the same on every device.

    torch's generators differ between GPU models, so replicas on different GPUs would diverge.
    """
    state = torch.arange(-(-count // 4), device=device) * signed(STRIDE) + signed(key)
    for shift, factor in SCRAMBLES:
        state = (state ^ ((state >> shift) & ((1 << 64 - shift) - 1))) * signed(factor)
    return state.view(torch.int16)[:count].int() & 0xFFFF


def signed(word: int) -> int:
    """Return the int64 with the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word
