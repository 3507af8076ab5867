"""Counts the bytes of a training process, and finds the settings that would save some of them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.monitors.memory.allocator import GIB
from trainer.parallel.memory_search import state_share

LEAST = 0.005  # of all bytes: a setting that saves less is not named


@dataclass(frozen=True)
class Use:
    """Bytes of one process. `rest` has the activations, temporary tensors, and on a CPU the libraries."""

    peak: int
    weights: int
    gradients: int
    state: int  # of the optimizer
    expected: bool  # the optimizer has no state yet, and `state` is computed
    limit: int = 0  # bytes of the device that the process may take; 0: unknown

    @property
    def rest(self) -> int:
        """The bytes of the peak that are neither weights, gradients nor state."""
        return max(0, self.peak - self.weights - self.gradients - (0 if self.expected else self.state))

    def __str__(self) -> str:
        limit = f" of {self.limit / GIB:.2f}" if self.limit else ""
        parts = {"weights": self.weights, "gradients": self.gradients}
        parts |= {"optimizer, to come" if self.expected else "optimizer": self.state}
        parts |= {"activations and the rest": self.rest}
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        return f"peak {self.peak / GIB:.2f}{limit} GiB ({listed})"


@dataclass(frozen=True)
class Setting:
    """The settings of the run that decide which advice makes sense."""

    micro: int  # samples of the largest micro-batch
    precision: str
    cuda: bool
    optimizer: str  # class name
    saved: Mapping[str, float]  # the words that add a callback -> bytes that it saves
    finds: Sequence[str]  # the words that add a callback which finds the micro-batch
    optimizers: Collection[str]  # names of all optimizers


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's part of the tensors; a shared storage counts once."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # DTensor's
    return sum({(p.data_ptr(), p.device): p.numel() * p.element_size() for p in parts}.values())


def count_state(
    optimizer: Optimizer, parameters: Iterable[Tensor], new_optimizer: Callable[[nn.Module], Optimizer]
) -> tuple[int, bool]:
    """Return the bytes of the optimizer's state; before its first step, an upper bound by prediction and True.

    `parameters` are those that this rank steps. Those in bf16 have a float32 state, too.
    """
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    if held:
        return size(held), False
    share = 0.0
    with suppress(Exception):  # of an optimizer that only steps its recipe's model; advice must not fail
        share = state_share(new_optimizer, torch.device("cpu"))
    return int(share * sum(size([p]) * max(1, 4 // p.element_size()) for p in parameters)), True


def advise(use: Use, setting: Setting) -> str:
    """Return the settings that save memory, the most effective first, with an upper limit of what they save."""
    ways = [(saved, text) for saved, text in _ways(use, setting) if saved > LEAST * use.peak]
    ways.sort(key=lambda way: -way[0])
    named = [f"{text} (up to {saved / GIB:.2f} GiB less)" for saved, text in ways]
    named += [f"{words} (finds micro_batch itself)" for words in setting.finds]
    return ", ".join(named) or "a smaller model"


def _ways(use: Use, setting: Setting) -> list[tuple[float, str]]:
    ways: list[tuple[float, str]] = []
    if setting.micro > 1:
        half = setting.micro // 2
        ways.append((use.rest * (1 - half / setting.micro), f"micro_batch={half}, with the same batch"))
    ways += [(saved, words) for words, saved in setting.saved.items()]
    if setting.cuda and setting.precision in ("fp32", "tf32"):
        ways.append((use.rest / 2, "trainer.precision=bf16"))
    if "adamw8bit" in setting.optimizers and setting.optimizer == "AdamW":
        # A byte an element, and a float32 scale for each 256 of them, instead of 4 bytes an element.
        ways.append((use.state * (1 - (1 + 4 / 256) / 4), "optimizer=adamw8bit"))
    return ways
