"""The codecs against torch's own hooks, the bytes that are sent, and the stated bound."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from toy_recipe import Toy

from trainer.callback import Callback, Role, arrange
from trainer.callbacks.grad_compress import GradCompress
from trainer.data.loader import Loader
from trainer.distributed import Ranks, all_reduce_mean
from trainer.errors import ConfigError
from trainer.launch import Place
from trainer.optim import parameter_groups, sgd
from trainer.options import DataOptions, DDPOptions, Options
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
    """Every output counts, so that no rank's loss is scaled."""

    def transform(self, sample: dict[str, torch.Tensor], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        return {**sample, "mask": torch.ones(4)}


def make(place: Place, callbacks: dict[str, Callback]) -> Trainer:
    return Trainer(
        Even(width=64),
        callbacks,
        sgd,
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
    optimizer = sgd(parameter_groups(module))
    stream = Loader(recipe, trainer.plan, place.rank, place.world, trainer.device).train(trainer.plan.source, 0)
    steps = [next(stream) for _ in range(STEPS)]
    for n, step in enumerate([steps[0], steps[0], *steps]):
        recipe.loss(model, step.batches[0]).backward()
        if n > 1:
            optimizer.step()
        optimizer.zero_grad()
    del model
    trainer.close()
    return [p.detach().numpy() for p in module.parameters()]


@pytest.mark.parametrize("codec", HOOKS)
def test_the_steps_are_those_of_torchs_hook(codec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reference, compressed = run_ranks(3, torchs, codec), run_ranks(3, ours, codec)
    for expected, (weights, _) in zip(reference, compressed, strict=True):
        for a, b in zip(expected, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_half_of_the_bytes_are_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (weights, plain), *_ = run_ranks(3, ours, None)
    assert plain == STEPS * 4 * sum(w.size for w in weights)
    for codec in HOOKS:
        assert {sent for _, sent in run_ranks(3, ours, codec)} == {plain // 2}


def mean_error(place: Place, codec: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Of the chain on numbers of many magnitudes: the worst element beside its bound, and the whole in the L2 norm."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    callback = GradCompress(codec)
    reduce: Any = callback.wrap_reduce(None, all_reduce_mean(ranks.new_group()))
    generator = torch.Generator().manual_seed(place.rank)
    mine = torch.randn(50_000, generator=generator) * 10 ** torch.empty(50_000).uniform_(-2, 3, generator=generator)
    mean = reduce(mine.clone(), None)
    assert mean.dtype == torch.float32
    everyone = [torch.empty_like(mine) for _ in range(place.world)]
    dist.all_gather(everyone, mine)
    exact = torch.stack(everyone).double()
    error, size = (mean.double() - exact.mean(0)).abs(), exact.abs().mean(0)
    bound = callback.error_bound(place.world)
    ranks.close()
    return (error / size).numpy(), bound, float(error.norm() / exact.mean(0).norm())


@pytest.mark.parametrize(("codec", "unit"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_the_stated_bound(codec, unit):
    """Each element to (world + 1) roundings of the mean absolute value; and not ten times better than that."""
    for errors, bound, norm in run_ranks(3, mean_error, codec):
        assert bound == 4 * unit
        assert bound / 10 < errors.max() <= bound * (1 + unit) ** 4
        assert norm < bound


def test_fp16_gradients_under_fp16s_loss_scale_are_refused():
    with pytest.raises(ConfigError, match=r"grad_compress and fp16 can't run together: .*use codec=bf16"):
        arrange({"grad_compress": GradCompress("fp16")}, {"fp16"})
    arrange({"grad_compress": GradCompress("bf16")}, {"fp16"})
