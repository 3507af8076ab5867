"""Sends gradients in fewer bytes: encoded by a codec of trainer/comm/codecs, with error feedback if it needs that."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Annotated, Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from trainer.annotated import AtMost, Beta, Made, NonNegativeInt, PositiveFloat, PositiveInt
from trainer.callback import Callback, Role, Symptom
from trainer.checks.recipe import refuse_complex
from trainer.comm.bucket import Bucket
from trainer.comm.codecs.base import Codec, ErrorFeedback, merge
from trainer.comm.codecs.registry import CODECS, CodecName, make, name_of
from trainer.comm.reduce import AllReduce, Reduce
from trainer.comm.two_level import TwoLevel
from trainer.context import Context
from trainer.cost.setup import Cost
from trainer.cost.variant import Situation, Variant
from trainer.errors import ConfigError
from trainer.log import log

KEY = "callbacks.grad_compress"


class GradCompress(Callback):
    """Encodes each bucket with a codec, reduces it, and decodes it: lossy, unless the codec is exact.

    Each rank saves its own residuals and momenta. On another number of ranks all start from the mean, so the next mean
    gradient contains the same part of them. `codec` may be a `Codec` with knobs of its own.
    """

    role = Role.COMPRESS
    remedies = {Symptom.NETWORK: [{}], Symptom.TRAFFIC: [{}]}
    family = ("codec", "level")
    exact = False
    communicates = True

    def __init__(
        self,
        codec: CodecName | Made = "bf16",
        feedback: bool | None = None,
        start_step: NonNegativeInt = 0,
        level: Literal["all", "inter"] = "all",
        density: Annotated[PositiveFloat, AtMost(1)] | None = None,
        rank: PositiveInt | None = None,
        factors: Literal["fp32", "bf16"] | None = None,
        block: PositiveInt | None = None,
        rounding: Literal["stochastic", "nearest"] | None = None,
        momentum: Beta | None = None,
        clip_norm: PositiveFloat | None = None,
        warmup_steps: NonNegativeInt | None = None,
    ) -> None:
        self.names: dict[Tensor, str] = {}  # names of the parameters, once they are known
        self.own: Callable[[Bucket], Bucket] | None = None  # bucket -> the part that this rank encodes; None: no part
        knobs = {
            "density": density,
            "rank": rank,
            "factors": factors,
            "block": block,
            "rounding": rounding,
            "momentum": momentum,
        }
        self.codec: Codec = made(codec, knobs | {"clip_norm": clip_norm, "warmup_steps": warmup_steps})
        name = name_of(self.codec)
        self.exact, self.start_step = self.codec.exact, start_step
        self.level, self.momentum = level, momentum
        refuse(name, self.codec, feedback, level)
        if self.codec.feedback if feedback is None else feedback:
            self.codec = ErrorFeedback(self.codec)
        self.conflicts = conflicts(name, self.codec, level, momentum, clip_norm)
        fed_back = isinstance(self.codec, ErrorFeedback)
        self.setting = {"codec": name, "feedback": fed_back, "level": level, "keeps": bool(self.codec.kept)}
        self.provides = frozenset({"compresses_all"} if level == "all" else ())
        if level == "inter":
            self.requires = {"hierarchical": "level=inter compresses between nodes; add hierarchical, or use level=all"}

    @classmethod
    def variants(cls, at: Situation) -> Iterable[Variant]:
        if at.ranks == 1:
            return []
        knobs = [{"codec": codec} for codec in ("bf16", "fp16", "int8", "topk", "powersgd")]
        parts = [each for each in knobs if at.two_levels and not CODECS[each["codec"]].matrices]
        inter = [{**each, "level": "inter"} for each in parts]
        return [Variant(each) for each in [*knobs, *inter]]

    def cost(self) -> Cost:
        name, between = self.setting["codec"], self.level == "inter"
        why = "" if self.codec.counted else f"{name} has no payload_bytes, and is taken to send plain gradients"
        return Cost(why, codec=self.codec, codec_name=name, between_nodes=between)

    def wrap_reduce(self, trainer, reduce: Reduce) -> Reduce:
        refuse_complex(trainer.module, "callbacks.grad_compress", "codecs send real numbers")
        if self.level == "all":
            if self.codec.gathers and not isinstance(reduce, AllReduce):
                raise ConfigError(
                    f"callbacks.grad_compress.codec={self.setting['codec']}: its all-gather bypasses the callback "
                    "that changes the reduction; leave that callback out, or use codec=bf16"
                )
            self.own = lambda bucket: bucket
            group = reduce.group if isinstance(reduce, AllReduce) else None  # of a pipeline: a stage's replicas
            ranks = (group.size(), group.rank()) if group else (trainer.world, trainer.rank)
            return self._compress(trainer, reduce, *ranks)
        assert isinstance(reduce, TwoLevel)
        if reduce.nodes > 1:
            self.own = reduce.own
            reduce.across = self._compress(trainer, reduce.across, reduce.nodes, reduce.node)
        return reduce

    def _compress(self, trainer: Context, reduce: Reduce, ranks: int, rank: int) -> Reduce:
        self.codec.join(ranks, rank, trainer.options.seed)

        def compressed(flat: Tensor, bucket: Bucket) -> Tensor:
            if not trainer.rehearsing and bucket.step < self.start_step:
                return reduce(flat, bucket)
            codec = deepcopy(self.codec) if trainer.rehearsing else self.codec  # a rehearsal leaves no residuals
            codec.mean(flat, flat, bucket, reduce)
            return flat

        return compressed

    def on_fit_start(self, trainer) -> None:
        """Lay out the restored residuals for DDP's current buckets, or refuse them before anything has changed."""
        if self.own is None:
            if any(kept.restored for kept in self.codec.kept.values()):
                log.warning("resume: grad_compress.level=inter does nothing on one node; its residuals are kept")
            return
        message = ""
        try:
            for indices in trainer.buckets:
                bucket = self.own(Bucket.of([trainer.parameters[i] for i in indices], trainer.step))
                for kept in self.codec.kept.values():
                    kept.take(bucket)
        except ConfigError as error:
            message = str(error)
        if message := next(filter(None, trainer.ranks.gather(message)), ""):  # this rank's or another's
            raise ConfigError(message)

    def on_step_undone(self, trainer) -> None:
        """Drop all residuals, because a number that is not finite would never leave them."""
        if self.codec.kept or self.codec.shared:
            self.codec.forget()
            log.warning("grad_compress: the codec's residuals are dropped")

    def wrap_optimizer(self, trainer, optimizer: Optimizer) -> Optimizer:
        self.names = {p: name for name, p in trainer.module.named_parameters()}  # a strategy may have replaced them
        momenta = [group.get("momentum") or group.get("betas") for group in optimizer.param_groups]
        if self.momentum and any(momenta):
            raise ConfigError(
                f"callbacks.grad_compress.momentum={self.momentum}: the optimizer has momentum too, {momenta[0]}; "
                "use optimizer=sgd with optimizer.momentum=0, or leave callbacks.grad_compress.momentum out"
            )
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        shared = self.codec.shared.items()
        return {"setting": self.setting} | {
            key: {self.names[p]: value for p, value in values.items()} for key, values in shared
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["setting"]
        for key, value in self.setting.items():
            if value != saved[key] and (saved["keeps"] or self.codec.kept):
                raise ConfigError(
                    f"callbacks.grad_compress.{key}={value}: the checkpoint has {saved[key]}, whose residuals would "
                    f"be lost; set {key} back, or take the weights alone: trainer.init_from"
                )
        for key, values in self.codec.shared.items():
            by_name = state.get(key, {})
            values.update({p: by_name[name].to(p.device) for p, name in self.names.items() if name in by_name})

    def rank_state_dict(self) -> dict[str, Any]:
        return {key: kept.state(self.names) for key, kept in self.codec.kept.items()}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        for key, kept in self.codec.kept.items():
            kept.load(state.get(key, {}), self.names)

    def merge_rank_states(self, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
        return merge(states)


def made(codec: str | Made, knobs: dict[str, Any]) -> Codec:
    """Return the codec: by its name with these knobs, or an object, which has knobs of its own."""
    if isinstance(codec, str):
        try:
            return make(codec, knobs)
        except ConfigError as error:
            text = str(error).removeprefix("codec")
            raise ConfigError(f"{KEY}.codec{text}" if text.startswith("=") else f"{KEY}{text}") from None
    if not isinstance(codec, Codec):
        reason = f"{type(codec).__name__} is no codec; inherit from trainer.comm.codecs.base.Codec"
        raise ConfigError(f"{KEY}.codec: {reason}")
    if not hasattr(codec, "kept"):
        raise ConfigError(f"{KEY}.codec: the constructor of {name_of(codec)} does not call super().__init__(); add it")
    for knob, value in knobs.items():
        if value is not None:
            raise ConfigError(f"{KEY}.{knob}={value}: {name_of(codec)} has knobs of its own; set {KEY}.codec.{knob}")
    return deepcopy(codec)  # because several runs may use the object


def refuse(name: str, codec: Codec, feedback: bool | None, level: str) -> None:
    if feedback and (codec.kept or codec.exact):
        why = "sends everything" if codec.exact else "has an error feedback of its own"
        raise ConfigError(f"{KEY}.feedback=true: codec={name} {why}; leave feedback out")
    if level == "inter" and codec.matrices:
        raise ConfigError(
            f"{KEY}.level=inter: between nodes a rank has a part of each matrix, and codec={name} needs whole "
            "matrices; use level=all, or another codec"
        )


def conflicts(
    name: str, codec: Codec, level: str, momentum: float | None, clip_norm: float | None
) -> dict[Role | str, str]:
    """Return the codec's conflicts, in the form of `Callback.conflicts`."""
    refused: dict[Role | str, str] = {}
    if codec.kept:
        refused["fp16"] = (
            f"codec={name} keeps residuals from step to step, but the loss scale changes, and residuals of a step that "
            "the scaler skips would stay; use trainer.precision=bf16, or codec=fp16"
        )
        refused["find_unused_parameters"] = (
            f"codec={name} would send residuals of parameters that no rank has used, and DDP drops these; "
            "set trainer.ddp.find_unused_parameters=false, or use a codec without residuals"
        )
    if codec.shared:
        refused[Role.SPLIT] = f"codec={name} keeps one state for all ranks, and stages differ; use another codec"
    if momentum or clip_norm:
        knob = "momentum" if momentum else "clip_norm"
        reason = f"{knob} applies to gradients, and local_sgd sends weights"
        refused[Role.SYNC] = f"{reason}; leave callbacks.grad_compress.{knob} out"
    if codec.gathers and level == "all":
        refused[Role.REDUCE] = (
            f"codec={name} uses an all-gather, so there is no reduction to change; "
            "use callbacks.grad_compress.level=inter with hierarchical, or leave one out"
        )
    return refused
