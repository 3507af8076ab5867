"""The interface of codecs, error feedback around any codec, and residuals kept between steps."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.annotated import Made, check_arguments
from trainer.comm.bucket import Bucket, Piece
from trainer.comm.reduce import AllReduce, Reduce
from trainer.cost.messages import Message, Shapes, elements
from trainer.errors import ConfigError
from trainer.rng import CODEC_NOISE, mix


class Codec(Made):
    """Base class of codecs, which encode a flat tensor as a payload, and decode payloads.

    A codec with a single payload implements `encode`, `decode` and `payload_bytes`. One that communicates more than
    once overrides `mean` and `messages`.
    """

    gathers: bool = False  # payloads can't be summed in transit; `reduce` is the chain's end, an AllReduce
    feedback: bool = False  # the unsent part should be added to the next step's gradient
    exact: bool = False  # the result is the true mean, up to rounding
    matrices: bool = False  # whole parameters are needed, not parts of them

    ranks, rank, seed = 1, 0, 0  # set by `join`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = check_arguments("codec.")(cls.__init__)

    def __init__(self) -> None:
        self.kept: dict[str, Residuals] = {}  # this rank's own
        self.shared: dict[str, dict[Tensor, Tensor]] = {}  # by parameter, the same on all ranks
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return memory for a payload with as many elements as `like`, the same in every step.

        On a CPU, allocating fresh memory takes longer than the codec itself. Buckets of equal size share the memory,
        because one bucket is sent at a time.
        """
        key = like.numel(), dtype
        if key not in self.buffers:
            self.buffers[key] = torch.empty_like(like, dtype=dtype)
        return self.buffers[key]

    def join(self, ranks: int, rank: int, seed: int) -> None:
        """Set the number of payloads in a mean, the index of this rank's payload, and the random seed."""
        self.ranks, self.rank, self.seed = ranks, rank, seed

    def forget(self) -> None:
        """Drop all state that is kept between steps."""
        for kept in self.kept.values():
            for flat in kept.flats.values():
                flat.zero_()
        for values in self.shared.values():
            values.clear()

    def generator(self, device: torch.device, bucket: Bucket) -> torch.Generator:
        """Return this rank's random numbers for a bucket of a step; dropout draws from torch's own at the same time."""
        first = bucket.pieces[0]
        key = mix(self.seed, CODEC_NOISE, bucket.step, self.rank, *first.param.shape, first.start, first.stop)
        return torch.Generator(device).manual_seed(key >> 1)

    @property
    def residual_copies(self) -> float:
        """Copies of the reduced tensor that stay in memory between steps."""
        return 0.0

    @property
    def counted(self) -> bool:
        """Whether the codec declares how many bytes it sends."""
        own = type(self)
        return own.payload_bytes is not Codec.payload_bytes or own.messages is not Codec.messages

    def payload_bytes(self, shapes: Shapes) -> float:
        """Return the payload's bytes for a bucket of float32 parameters of these shapes."""
        return 4.0 * elements(shapes)

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]:
        """Return the collectives of `mean`, for the cost model; by default those of one payload."""
        size = self.payload_bytes(shapes)
        return [Message("all_gather", ranks * size) if self.gathers else Message("all_reduce", size)]

    def decodes(self, ranks: int) -> int:
        """Return how many bucket-sized payloads each rank decodes."""
        return ranks if self.gathers else 1

    def encode(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """Return the payload, whose size is equal on all ranks."""
        raise NotImplementedError

    def decode(self, payload: Tensor, out: Tensor, weight: float, bucket: Bucket) -> None:
        """Add `weight` times the decoded payload to `out`."""
        raise NotImplementedError

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        """Write the mean over ranks of the sent parts to `out`, and leave the unsent part in `flat`.

        If `out` is `flat`, the unsent part is lost.
        """
        payload = self.encode(flat, bucket)
        if out is not flat:
            self.decode(payload, flat, -1.0, bucket)
        self.send(payload, out, bucket, reduce)

    def send(self, payload: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        """Write the mean over ranks of the decoded payloads to `out`."""
        if self.gathers:
            assert isinstance(reduce, AllReduce)
            rows = reduce.gather(payload)
        else:
            rows = [reduce(payload, bucket)]
        out.zero_()
        for row in rows:
            self.decode(row, out, 1.0 / len(rows), bucket)


class ErrorFeedback(Codec):
    """Adds the part that `codec` did not send to the next step's gradient.

    Papers: Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847. The sent parts and the residual add up to the
    sum of all gradients. Memory: one copy of the reduced tensor.
    """

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.codec, self.gathers = codec, codec.gathers
        self.residual = Residuals()
        self.kept, self.shared = {**codec.kept, "residual": self.residual}, codec.shared

    @property
    def residual_copies(self) -> float:
        return 1.0 + self.codec.residual_copies

    @property
    def counted(self) -> bool:
        return self.codec.counted

    def messages(self, shapes: Shapes, ranks: int) -> list[Message]:
        return self.codec.messages(shapes, ranks)

    def decodes(self, ranks: int) -> int:
        return self.codec.decodes(ranks)

    def join(self, ranks: int, rank: int, seed: int) -> None:
        self.codec.join(ranks, rank, seed)

    def mean(self, flat: Tensor, out: Tensor, bucket: Bucket, reduce: Reduce) -> None:
        residual = self.residual.of(bucket, flat)
        residual += flat
        if residual.dtype == out.dtype:
            return self.codec.mean(residual, out, bucket, reduce)
        mean = torch.empty_like(residual)
        self.codec.mean(residual, mean, bucket, reduce)
        out.copy_(mean)


# Kind of bucket -> name of parameter -> "start:stop" of its elements -> their values.
Stretches = dict[str, dict[str, dict[str, Tensor]]]


class Residuals:
    """A value for each reduced element, initially zero: one flat tensor per bucket.

    The dtype is float32 or wider, because small gradients would not add up in 16 bits.
    """

    def __init__(self) -> None:
        self.flats: dict[tuple[str, tuple[Piece, ...]], Tensor] = {}
        self.restored: Stretches = {}
        self.names: Mapping[Tensor, str] = {}

    def of(self, bucket: Bucket, like: Tensor) -> Tensor:
        key = bucket.kind, bucket.pieces
        if key not in self.flats:
            flat = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
            restored = self.restored.get(bucket.kind, {})
            for view, (p, start, stop) in zip(bucket.split(flat), bucket.pieces, strict=True):
                if (name := self.names.get(p, "")) in restored:
                    fill(view.view(-1), start, stop, restored[name], name)
            self.flats[key] = flat
        if restored := self.restored.get(bucket.kind):
            for p, _, _ in bucket.whole:
                restored.pop(self.names.get(p, ""), None)  # laid out here now, or on other ranks
        return self.flats[key]

    def take(self, bucket: Bucket) -> None:
        """Lay out all restored residuals of this bucket. Raise ConfigError if other ranks have some of the elements."""
        if self.restored.get(bucket.kind):
            like = bucket.whole[0].param
            own = torch.empty(bucket.numel(), dtype=like.dtype, device=like.device)  # `like` may be sharded
            self.of(bucket, own)

    def state(self, names: Mapping[Tensor, str]) -> Stretches:
        """Return all residuals by name, including restored ones that are not laid out yet."""
        used: Stretches = {}
        for (kind, pieces), flat in self.flats.items():
            for view, (p, start, stop) in zip(Bucket(pieces, 0).split(flat), pieces, strict=True):
                used.setdefault(kind, {}).setdefault(names[p], {})[f"{start}:{stop}"] = view.view(-1)
        return {kind: self.restored.get(kind, {}) | used.get(kind, {}) for kind in self.restored | used}

    def load(self, state: Stretches, names: Mapping[Tensor, str]) -> None:
        """Keep `state` until it is laid out for buckets, whose pieces may have changed."""
        self.flats, self.restored, self.names = {}, state, names


def fill(view: Tensor, start: int, stop: int, stretches: Mapping[str, Tensor], name: str) -> None:
    """Copy elements `start` to `stop` from `stretches` into `view`. Raise ConfigError if some are missing."""
    missing = stop - start
    for key, values in stretches.items():
        first, last = map(int, key.split(":"))
        low, high = max(start, first), min(stop, last)
        if low < high:
            view[low - start : high - start] = values[low - first : high - first]
            missing -= high - low
    if missing:
        raise ConfigError(
            f"trainer.resume: other ranks have the residuals of {name}; set callbacks.hierarchical and the size of "
            "buckets as they were, or start a new run with trainer.resume=null"
        )


def merge(states: Iterable[Mapping[str, Stretches]]) -> dict[str, Stretches]:
    """Return the mean of each element over the ranks that had it, with one state in memory at a time.

    `states` has each rank's residuals by name. If every rank (or every rank of a slow level) has an element, the next
    mean contains the same part of the element as before. So a run may continue on any number of ranks.
    """
    means: dict[str, dict[str, dict[str, RunningMean]]] = {}
    for state in states:
        _add(state, means)
        del state  # before the next is read
    return {
        key: {kind: {name: mean.stretches() for name, mean in by_name.items()} for kind, by_name in kinds.items()}
        for key, kinds in means.items()
    }


class RunningMean:
    """The mean of each element of a parameter over the ranks that had it, so far."""

    def __init__(self) -> None:
        self.total = self.holders = torch.zeros(0)

    def add(self, stretches: Mapping[str, Tensor]) -> None:
        for key, values in stretches.items():
            start, stop = map(int, key.split(":"))
            if stop > len(self.total):  # no rank before had these elements
                more = values.new_zeros(stop - len(self.total))
                self.total, self.holders = torch.cat([self.total, more]), torch.cat([self.holders, more])
            self.total[start:stop] += values
            self.holders[start:stop] += 1

    def stretches(self) -> dict[str, Tensor]:
        return {f"0:{len(self.total)}": self.total.div_(self.holders.clamp_(min=1))}


def _add(state: Mapping[str, Stretches], means: dict[str, dict[str, dict[str, RunningMean]]]) -> None:
    for key, kinds in state.items():
        for kind, by_name in kinds.items():
            for name, stretches in by_name.items():
                means.setdefault(key, {}).setdefault(kind, {}).setdefault(name, RunningMean()).add(stretches)
        means.setdefault(key, {})
