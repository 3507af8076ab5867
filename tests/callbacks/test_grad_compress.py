"""The codecs against torch's own hooks, the bytes that are sent, and the stated bound."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.comm.bucket import Bucket
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import sgd
from trainer.optim.groups import parameter_groups
from trainer.process.environment import Place
from trainer.trainer import Trainer

HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
STEPS = 5


class Count(Callback):
    """Bytes of gradients in `dist.all_reduce`, without the rehearsal's. On its own it sends them as they are."""

    role = Role.REDUCE
    communicates = True

    def wrap_reduce(self, trainer, reduce):
        self.bytes, plain = 0, dist.all_reduce

        def all_reduce(tensor, *args, **kwargs):
            if tensor.is_floating_point() and not trainer.rehearsing:
                self.bytes += tensor.nbytes
            return plain(tensor, *args, **kwargs)

        def counted(flat, bucket):
            dist.all_reduce = all_reduce
            try:
                return reduce(flat, bucket)
            finally:
                dist.all_reduce = plain

        return counted


class Even(Toy):
    """Every output counts, so that no rank's loss is scaled. Gradients are above 6e-5, where fp16's spacing is even."""

    def transform(self, sample: dict[str, torch.Tensor], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        return {**sample, "mask": torch.ones(4)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, batch) * 1024


def slow_sgd(params: Any) -> torch.optim.Optimizer:
    return sgd(params, lr=0.1 / 1024)


def make(place: Place, callbacks: dict[str, Callback]) -> Trainer:
    return Trainer(
        Even(width=64),
        callbacks,
        slow_sgd,
        batch=12,
        options=Options(max_steps=STEPS, ddp=DDPOptions(bucket_mib=0.01)),
        data=DataOptions(workers=0),
        place=place,
    )


def ours(place: Place, codec: str | None) -> tuple[list[np.ndarray], int]:
    count = Count()
    trainer = make(place, {"count": count, **({"grad_compress": GradCompress(codec)} if codec else {})})
    trainer.fit()
    return [p.detach().numpy() for p in trainer.module.parameters()], count.bytes


def torchs(place: Place, codec: str) -> list[np.ndarray]:
    """A bare loop with torch's hook, on the trainer's batches. Two passes more at first, for DDP's buckets."""
    trainer = make(place, {})
    recipe, module = trainer.recipe, trainer.recipe.model()
    module.load_state_dict(trainer.module.state_dict())
    model = DDP(module, bucket_cap_mb=0.01)

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return HOOKS[codec](None, bucket)  # DDP knows torch's bf16 hook by its name, and lets it run on a GPU only

    model.register_comm_hook(None, hook)
    optimizer = slow_sgd(parameter_groups(module))
    stream = trainer.loader.train(0)
    steps = [[batch for batch, _ in next(stream)] for _ in range(STEPS)]
    for n, (batch,) in enumerate([steps[0], steps[0], *steps]):
        recipe.loss(model, batch).backward()
        if n > 1:
            optimizer.step()
        optimizer.zero_grad()
    del model
    trainer.close()
    return [p.detach().numpy() for p in module.parameters()]


@pytest.mark.parametrize("codec", HOOKS)
def test_the_steps_are_those_of_torchs_hook(codec, tmp_path):
    reference, compressed = run_ranks(3, torchs, codec), run_ranks(3, ours, codec)
    for expected, (weights, _) in zip(reference, compressed, strict=True):
        for a, b in zip(expected, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_half_of_the_bytes_are_sent(tmp_path):
    (weights, plain), *_ = run_ranks(3, ours, None)
    assert plain == STEPS * 4 * sum(w.size for w in weights)
    buckets = 3
    for codec in HOOKS:
        scales = STEPS * buckets * 4 if codec == "fp16" else 0
        assert {sent for _, sent in run_ranks(3, ours, codec)} == {plain // 2 + scales}


def twice(place: Place) -> str:
    with pytest.raises(ConfigError) as refusal:
        Trainer(Even(), {"grad_compress": GradCompress("dgc", momentum=0.9)}, slow_sgd, batch=12, place=place)
    return str(refusal.value)


@pytest.mark.slow
def test_momentum_in_two_places_is_refused(tmp_path):
    for message in run_ranks(2, twice):
        assert message.startswith("callbacks.grad_compress.momentum=0.9: the optimizer has momentum too, 0.9; ")


class Shards(Count):
    """Reduces too, though its role doesn't say so."""

    role = Role.SHARD


def past(place: Place, own: type[Callback]) -> str:
    with pytest.raises(ConfigError) as refusal:
        make(place, {"own": own(), "grad_compress": GradCompress("topk")})
    return str(refusal.value)


@pytest.mark.parametrize(
    ("own", "begin", "end"),
    [
        (Count, "grad_compress and own can't run together: codec=topk uses an all-gather", "leave one out"),
        (Shards, "callbacks.grad_compress.codec=topk: its all-gather ", "leave that callback out, or use codec=bf16"),
    ],
)
def test_a_users_own_reduction_is_not_gone_around(own, begin, end, tmp_path):
    for message in run_ranks(2, past, own):
        assert message.startswith(begin) and message.endswith(end), message


class Reduced(Callback):
    """The norm of what comes back from the chain, and how far the step then goes."""

    role = Role.MEASURE

    def __init__(self) -> None:
        self.norms: list[tuple[float, float, float]] = []

    def on_before_optimizer_step(self, trainer) -> None:
        self.before = [p.detach().clone() for p in trainer.parameters]
        self.norm = torch.cat([p.grad.view(-1) for p in trainer.parameters]).norm().item()

    def on_step_end(self, trainer) -> None:
        steps = [(p.detach() - old).view(-1) for p, old in zip(trainer.parameters, self.before, strict=True)]
        self.norms.append((self.norm, trainer.metrics["train/grad_norm"], torch.cat(steps).norm().item()))


def clipped(place: Place, codec: str) -> list[tuple[float, float, float]]:
    reduced = Reduced()
    trainer = Trainer(
        Even(), {"grad_compress": GradCompress(codec), "reduced": reduced},
        lambda groups: torch.optim.SGD(groups, lr=0.1), batch=12,
        options=Options(max_steps=4, clip_norm=0.05, log_every_steps=1), data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return reduced.norms


@pytest.mark.parametrize("codec", ["topk", "powersgd", "int8"])
def test_what_comes_back_is_clipped(codec, tmp_path):
    """Not what is sent, of which the residual would keep the rest: the norm is of the mean, which all ranks have."""
    ranks = run_ranks(3, clipped, codec)
    assert ranks[0] == ranks[1] == ranks[2]
    for norm, reported, moved in ranks[0]:
        assert norm > 0.06 and reported == pytest.approx(norm, rel=1e-5)
        assert moved == pytest.approx(0.1 * 0.05, rel=1e-3)


STAGES = {"straight": (3, 6), "before": (3, 3), "same": (3, 6), "fewer": (2, 6), "more": (4, 6)}


class Ledger(Callback):
    """Around the codec: what this rank gives for the buckets, in all, what comes back, and the residual before."""

    role = Role.SYNC

    def __init__(self, compress: GradCompress) -> None:
        kept = compress.codec.kept
        self.residual = kept.get("residual") or kept["v"]
        self.books: dict[str, Any] = {"given": {}, "back": {}, "before": {}, "after": {}}

    def wrap_reduce(self, trainer, reduce):
        def noted(flat, bucket):
            if trainer.rehearsing:
                return reduce(flat, bucket)
            name, residual = compress_names(trainer, bucket), self.residual.of(bucket, flat)
            self.books["before"].setdefault(name, residual.double().clone())
            given = flat.double()
            back = reduce(flat, bucket).double()
            for key, value in (("given", given), ("back", back)):
                self.books[key][name] = self.books[key].get(name, 0.0) + value
            self.books["after"][name] = residual.double()
            return flat

        return noted


def compress_names(trainer: Trainer, bucket: Bucket) -> str:
    names = {p: name for name, p in trainer.module.named_parameters()}
    return " ".join(names[piece.param] for piece in bucket.pieces)


def stage(place: Place, name: str, resume: str | None, codec: str, knobs: dict[str, Any]) -> dict[str, Any]:
    compress = GradCompress(codec, **{"feedback": True} | knobs)
    ledger = Ledger(compress)
    trainer = Trainer(
        Even(width=64), {"grad_compress": compress, "ledger": ledger}, slow_sgd, batch=12,
        options=Options(
            max_steps=STAGES[name][1], ddp=DDPOptions(bucket_mib=0.01), run_dir=f"runs/{name}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=3, keep=3),
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    books = {key: np.concatenate([book[name].numpy() for name in sorted(book)]) for key, book in ledger.books.items()}
    return books | {"weights": np.concatenate([p.detach().numpy().ravel() for p in trainer.module.parameters()])}


@pytest.mark.parametrize(
    ("codec", "knobs", "rounding"),
    [
        pytest.param("bf16", {}, 0.02, marks=pytest.mark.slow),  # of the sum on its way
        pytest.param("fp16", {}, 0.003, marks=pytest.mark.slow),
        pytest.param("int8", {}, 1e-5, marks=pytest.mark.slow),
        ("topk", {"density": 0.1}, 1e-5),
        pytest.param(
            "dgc", {"density": 0.1, "feedback": None}, 1e-5, marks=pytest.mark.slow
        ),  # its own, without momentum
        pytest.param("sign", {}, 1e-5, marks=pytest.mark.slow),
        pytest.param("powersgd", {"rank": 2}, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_sent_plus_residual_is_what_was_given(codec, knobs, rounding, tmp_path):
    """In the mean over ranks; across a checkpoint; and across a change of the number of ranks. A resume has the bits of
    a run that was not interrupted."""
    runs = {}
    for name, (world, _) in STAGES.items():
        resume = "ckpt/before/step-00000003" if name in ("same", "fewer", "more") else None
        runs[name] = run_ranks(world, stage, name, resume, codec, knobs)
        mean = {key: np.mean([rank[key] for rank in runs[name]], axis=0) for key in ("given", "before", "after")}
        back = runs[name][0]["back"]
        assert np.abs(mean["after"]).max() > 0
        scale = np.abs(mean["given"]).max()
        np.testing.assert_allclose(back + mean["after"], mean["given"] + mean["before"], atol=rounding * scale)
    assert not any(rank["before"].any() for rank in runs["straight"])
    left = np.mean([rank["after"] for rank in runs["before"]], axis=0)
    for name in ("same", "fewer", "more"):
        before = np.mean([rank["before"] for rank in runs[name]], axis=0)
        np.testing.assert_allclose(before, left, rtol=1e-6, atol=1e-6 * np.abs(left).max())
    for straight, same in zip(runs["straight"], runs["same"], strict=True):
        assert straight["weights"].tobytes() == same["weights"].tobytes()
        assert straight["after"].tobytes() == same["after"].tobytes()


class Seen(Callback):
    """What goes into the chain's end: (in the rehearsal, step, dtype)."""

    role = Role.REDUCE
    communicates = True

    def __init__(self) -> None:
        self.seen: set[tuple[bool, int, torch.dtype]] = set()

    def wrap_reduce(self, trainer, reduce):
        def noted(flat, bucket):
            self.seen.add((trainer.rehearsing, bucket.step, flat.dtype))
            return reduce(flat, bucket)

        return noted


def seen(place: Place) -> set[tuple[bool, int, torch.dtype]]:
    watch, compress = Seen(), GradCompress("bf16", feedback=True, start_step=1)
    trainer = make(place, {"watch": watch, "grad_compress": compress})
    trainer.fit()
    return watch.seen


def test_the_rehearsal_sends_what_steps_will(tmp_path):
    """From a copy of the codec, so that it leaves no residual: see `before` in test_sent_plus_residual."""
    steps = {(False, step, torch.bfloat16) for step in range(1, STEPS)}
    for sent in run_ranks(2, seen):
        assert sent == {(True, 0, torch.bfloat16), (False, 0, torch.float32)} | steps


class Calls(Callback):
    """How often the codec is asked in each step."""

    role = Role.SYNC

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}

    def wrap_reduce(self, trainer, reduce):
        def counted(flat, bucket):
            if not trainer.rehearsing:
                self.steps[bucket.step] = self.steps.get(bucket.step, 0) + 1
            return reduce(flat, bucket)

        return counted


def calls(place: Place, accumulate: int) -> tuple[list[int], int]:
    count = Calls()
    trainer = Trainer(
        Even(width=64), {"count": count, "grad_compress": GradCompress("topk")}, slow_sgd, batch=12,
        accumulate=accumulate, options=Options(max_steps=STEPS, ddp=DDPOptions(0.01)), data=DataOptions(workers=0),
        place=place,
    )  # fmt: skip
    trainer.fit()
    return list(count.steps.values()), len(trainer.buckets)


def test_a_bucket_is_encoded_once_a_step_however_many_micro_batches_it_has(tmp_path):
    """Else error feedback would keep back a part of each micro-batch's gradients."""
    for accumulate in (1, 2):
        for steps, buckets in run_ranks(3, calls, accumulate):
            assert buckets == 3 and steps == [buckets] * STEPS


def pseudo_gradients(place: Place) -> tuple[list[int], list[str]]:
    compress = GradCompress("topk", density=0.1)
    trainer = Trainer(
        Even(width=64), {"local_sgd": LocalSGD(every=2), "grad_compress": compress}, slow_sgd, batch=12,
        options=Options(max_steps=4), data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    state = compress.rank_state_dict()["residual"]
    return [len(by_name) for by_name in state.values()], list(state)


def test_local_sgds_pseudo_gradients_go_through_the_codec(tmp_path):
    """And no gradient does, which nothing reduces."""
    for sizes, kinds in run_ranks(3, pseudo_gradients):
        assert kinds == ["weights"] and sizes == [8]
