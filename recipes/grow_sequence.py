"""Trains on parts of the sequences first, which grow to whole sequences."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from trainer.callback import Callback, Role, only_logged
from trainer.context import Context
from trainer.data.batch import Step
from trainer.errors import ConfigError
from trainer.log import log

KEY = "callbacks.grow_sequence"
SHORTEST = 8  # tokens


class GrowSequence(Callback):
    """Cuts the sequences of T tokens into T / length, whose tokens attend among themselves, until a step.

    BERT trains 90 % of its steps on 128 tokens, the rest on 512 (Devlin et al. 2018, arXiv:1810.04805, A.2). Li et al.
    2021, arXiv:2108.06084, grow GPT-2's sequences from 64 tokens in many steps. They drop the other tokens. Here no
    token is dropped: batches, tokens to predict and weights stay the same, and attention costs less.

    The length follows from the step alone, so a resume has the same bits. Validation has whole sequences, and so has
    the rehearsal: memory is short before step 1, or never.

    Args:
        lengths: Tokens, rising; each divides the recipe's `sequence`.
        until: A duration for each length, such as `1000 steps`, from the start of the run. After the last
            one, sequences are whole.
    """

    role = Role.MODEL
    exact = False
    conflicts = {Role.SPLIT: "stages send activations of one shape; leave one out"}

    def __init__(self, lengths: list[int], until: list[int | str]) -> None:
        if not lengths or len(lengths) != len(until):
            raise ConfigError(f"{KEY}: {len(lengths)} lengths and {len(until)} durations; give each length an until")
        self.lengths, self.until = lengths, until

    def wrap_model(self, trainer: Context, model: nn.Module) -> nn.Module:
        whole = self._sequence(trainer.recipe)
        wrong = [length for length in self.lengths if length < SHORTEST or whole % length or length == whole]
        if wrong or not rises(self.lengths):
            divisors = ",".join(str(n) for n in range(SHORTEST, whole) if whole % n == 0)
            raise ConfigError(f"{KEY}.lengths={self.lengths}: must rise, and be divisors of {whole}: {divisors}")
        plan, key = trainer.plan, f"{KEY}.until"
        self.ends = [plan.step_after(key, end) for end in self.until]
        if not rises(self.ends):
            raise ConfigError(f"{key}={self.until}: is {self.ends} steps; give durations that rise")
        if plan.max_steps is not None and self.ends[-1] >= plan.max_steps:
            text = "grow_sequence: the run ends at step %d with %d of %d tokens, so later positions are never trained; "
            text += "end %s before"
            log.warning(text, plan.max_steps, self.length(plan.max_steps - 1), whole, key)
        return model

    def wrap_batches(self, trainer: Context, steps: Iterator[Step]) -> Iterator[Step]:
        recipe: Any = trainer.recipe
        before: int | None = -1
        for data in steps:  # `trainer.step` is restored by now
            recipe.length = self.length(trainer.step)
            if recipe.length != before:
                log.info("grow_sequence: %d tokens from step %d", recipe.length or self._sequence(recipe), trainer.step)
            before = recipe.length
            yield data

    def length(self, step: int) -> int | None:
        """Return the tokens of the step after `step` steps; None: whole sequences."""
        return next((length for length, end in zip(self.lengths, self.ends, strict=True) if step < end), None)

    @only_logged
    def on_step_end(self, trainer: Context) -> None:
        recipe: Any = trainer.recipe
        trainer.metrics["train/sequence"] = float(recipe.length or self._sequence(recipe))

    def _sequence(self, recipe: Any) -> int:
        """Return the tokens of a whole sequence.

        Raises:
            ConfigError: The recipe can't cut its sequences.
        """
        if not hasattr(recipe, "length"):
            name = type(recipe).__name__
            raise ConfigError(f"{KEY}: {name} can't cut sequences; use recipe bert_* or gpt2*, or leave it out")
        return recipe.tokens_per_sample


def rises(values: Sequence[int]) -> bool:
    return all(one < other for one, other in itertools.pairwise(values))
