"""Sends gradients in fewer bytes: one of the codecs of trainer/codecs, with error feedback where it needs that."""

import inspect
from typing import Any, Literal

from torch import Tensor

from trainer.callback import Callback, Role
from trainer.codecs.cast import BFloat16, Float16
from trainer.codecs.codec import Codec, ErrorFeedback, merge
from trainer.errors import ConfigError, require
from trainer.reduce import Bucket, Reduce

CODECS: dict[str, type[Codec]] = {"bf16": BFloat16, "fp16": Float16}


class GradCompress(Callback):
    """Encodes each bucket, reduces what the codec makes of it, and decodes that: lossy, unless the codec is exact.

    Residuals and momenta are this rank's own: they are saved for each rank, and at another number of ranks all start
    from their mean, which keeps the part that they have in the next mean gradient.

    Args:
        codec: What is sent; see trainer/callbacks/grad_compress.md.
        feedback: Add what was not sent to the next step's gradient; null: where the codec's paper does.
        start_step: Before it, gradients go as they are.
        **knobs: The codec's own; null leaves it to the codec.
    """

    role = Role.COMPRESS
    exact = False
    communicates = True

    def __init__(
        self,
        codec: Literal["bf16", "fp16"] = "bf16",
        feedback: bool | None = None,
        start_step: int = 0,
    ) -> None:
        require("callbacks.grad_compress.start_step", start_step, at_least=0)
        self.names: dict[Tensor, str] = {}  # of the parameters, once they are known
        self.codec = make(codec, {})
        self.exact, self.start_step = self.codec.exact, start_step
        if self.codec.feedback if feedback is None else feedback:
            self.codec = ErrorFeedback(self.codec)
        if self.codec.kept:
            self.conflicts = {
                "fp16": f"codec={codec} keeps gradients from step to step, in units of a loss scale that changes, and "
                "would keep those of a step that the scaler skips; use trainer.precision=bf16, or codec=fp16"
            }

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        self.codec.join(trainer.world, trainer.rank, trainer.options.seed)
        self.names = {p: name for name, p in trainer.module.named_parameters()}

        def compressed(flat: Tensor, bucket: Bucket) -> Tensor:
            if trainer.rehearsing or bucket.step < self.start_step:
                return reduce(flat, bucket)
            self.codec.mean(flat, flat, bucket, reduce)
            return flat

        return compressed

    def state_dict(self) -> dict[str, Any]:
        shared = self.codec.shared.items()
        return {key: {self.names[p]: value for p, value in values.items()} for key, values in shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, values in self.codec.shared.items():
            by_name = state.get(key, {})
            values.update({p: by_name[name].to(p.device) for p, name in self.names.items() if name in by_name})

    def rank_state_dict(self) -> dict[str, Any]:
        return {key: kept.state(self.names) for key, kept in self.codec.kept.items()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        for key, kept in self.codec.kept.items():
            kept.load(state.get(key, {}), self.names)

    def merge_rank_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {key: merge([state[key] for state in states]) for key in states[0]}


def make(name: str, knobs: dict[str, Any]) -> Codec:
    """Raises:
    ConfigError: for a knob that this codec does not have.
    """
    known = inspect.signature(CODECS[name]).parameters
    given = {knob: value for knob, value in knobs.items() if value is not None}
    for knob in given.keys() - known.keys():
        raise ConfigError(
            f"callbacks.grad_compress.{knob}={given[knob]}: codec={name} has no such knob; "
            f"leave it out (its knobs: {', '.join(known) or 'none'})"
        )
    return CODECS[name](**given)
