"""Cuts a model into the stages of a pipeline: runs a pass of one stage, and drops the parameters that it lacks.

A stage runs the model's own `forward` but skips the blocks of other stages. A gate before each block feeds in the
stage's input, or ends the pass with the stage's output. Code outside the blocks runs on every stage, without the
parameters that the stage lacks. These are NaN there, so a result that depends on one is NaN, and a rehearsal detects
it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.parallel.layout import Layout
from trainer.parallel.placeholder import Placeholder, placeholder

KEY = "callbacks.pipeline"


def check_blocks(blocks: Sequence[nn.Module], stages: int) -> None:
    """Raise ConfigError if the blocks can't be cut into this many stages."""
    if len(blocks) < stages:
        raise ConfigError(
            f"{KEY}.stages: {stages} stages, two on each rank if the schedule has that, and {len(blocks)} blocks; "
            "use fewer stages, or a deeper model"
        )
    for one, other in combinations(blocks, 2):
        if one is other or not {id(p) for p in one.parameters()}.isdisjoint(id(p) for p in other.parameters()):
            raise ConfigError(
                f"{KEY}: two blocks ({type(one).__name__}) share parameters, which stages would train apart; leave "
                "pipeline out, or return the blocks that differ in recipe.blocks()"
            )


def drop_others(model: nn.Module, own: set[str], device: torch.device) -> None:
    """Replace each parameter whose first name is not in `own` with a placeholder, under all of its names."""
    kept = {id(p) for name, p in model.named_parameters() if name in own}
    dropped: dict[int, Placeholder] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in kept and not isinstance(p, Placeholder):
                module._parameters[name] = dropped.setdefault(id(p), placeholder(p, device))
                kept.add(id(dropped[id(p)]))


class StageOutput(BaseException):
    """Ends a model's forward pass where a stage's output is ready. A model's `except Exception` does not catch it.

    `stream` is the output of the stage's last block, as the next block would receive it.
    """

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class StageGates:
    """Gates before the blocks of a model, with which a pass runs the blocks of one stage.

    A block's first argument, or its first keyword, must be a tensor. After each block the model must replace it with
    the block's output, or with a sum of both.
    """

    def __init__(self, blocks: Sequence[nn.Module], layout: Layout) -> None:
        self.layout, self.blocks = layout, blocks
        self.inner = [block.forward for block in blocks]
        self.first, self.stop = 0, len(blocks)
        self.received: Tensor | None = None
        self.trains, self.next = False, 0
        self.seed: Callable[[int], object] = lambda part: None
        for i, block in enumerate(blocks):
            block.forward = partial(self._pass, i, block.forward)

    def run(
        self,
        stage: int,
        received: Tensor | None,
        call: Callable[[], Any],
        seed: Callable[[int], object] = lambda part: None,
    ) -> tuple[Any, Tensor | None]:
        """Run the forward pass of one stage; return the call's value (None before the last stage) and the output.

        Args:
            received: The previous stage's output; None on the first stage.
            call: Calls the model; returns its value, or a loss computed from it.
            seed: Called with 0 before the blocks, with i + 1 before block i, and with one more after the last.
        """
        self.first, self.stop = self.layout.range(stage)
        self.received, self.next, self.seed = received, 0, seed
        self.trains = torch.is_grad_enabled()
        seed(0)
        value: Any = None
        stream = None
        try:
            # The part before the stage only supplies other values, so autograd records from the stage's first block on.
            with torch.set_grad_enabled(self.trains and received is None):
                value = call()
        except StageOutput as ended:
            stream = ended.stream
        finally:
            self.received = None
        self._expect(self.stop)
        return value, stream

    def _expect(self, index: int) -> None:
        if index != self.next:
            raise ConfigError(
                f"{KEY}: recipe.loss() or the model does not run all blocks once and in order; return the blocks in "
                "the order of the model in recipe.blocks(), or leave pipeline out"
            )

    def _pass(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(stream, Tensor):
            raise ConfigError(f"{KEY}: a block's first argument is {type(stream).__name__}; it must be a tensor")
        self._expect(index)
        self.next += index < self.stop
        if index >= self.stop:
            raise StageOutput(stream)
        if index < self.first:
            return self._unknown(stream) if index == 0 else stream
        if index == self.first and self.received is not None:
            self._enter(stream, self.received)
        self.seed(index + 1)
        out = forward(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise ConfigError(f"{KEY}: a block returns {type(out).__name__}; it must return one tensor")
        if index == self.layout.blocks - 1:
            self.seed(index + 2)
        return out

    def _unknown(self, stream: Tensor) -> Tensor:
        """Return NaNs in the shape of the stage's input, in place of the output of the skipped blocks."""
        assert self.received is not None
        return self.received.new_full((len(stream), *self.received.shape[1:]), math.nan)

    def _enter(self, stream: Tensor, received: Tensor) -> None:
        """Write the input into the model's own tensor, which it may also use after the block, as a residual."""
        form = (len(stream), *received.shape[1:])
        if stream.shape != form or stream.dtype != received.dtype or len(stream) > len(received):
            raise ConfigError(
                f"{KEY}: a block gets {tuple(stream.shape)} of {stream.dtype}, and the stage before has sent "
                f"{tuple(received.shape)} of {received.dtype}; blocks must keep shape and dtype, or leave pipeline out"
            )
        torch.set_grad_enabled(self.trains)
        inner = received.view_as(received) if len(stream) == len(received) else received[: len(stream)]
        if inner.requires_grad:
            inner.register_hook(Tensor.contiguous)  # gloo requires it
        stream.copy_(inner)


def padded(stream: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor, contiguous and padded to the rows of `shape`, because all messages have the same shape."""
    if len(stream) > shape[0] or stream.shape[1:] != shape[1:]:
        raise ConfigError(
            f"{KEY}: a micro-batch is {tuple(stream.shape)} between two stages, and the first one was {shape}; collate "
            "every micro-batch to the same shape"
        )
    if len(stream) < shape[0]:
        stream = torch.cat([stream, stream.new_zeros(shape[0] - len(stream), *stream.shape[1:])])
    return stream.contiguous()
