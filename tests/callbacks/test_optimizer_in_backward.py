"""Steps in the backward pass have the bits of those after it, and never hold all gradients."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.optimizer_in_backward import MOST_SENT, OptimizerInBackward
from trainer.comm.bucket import Bucket as Buckets
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import adamw, sgd
from trainer.optim.groups import WithGroups
from trainer.optim.schedule import Linear
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # the contract's rows are in the default run

STEPS = 4


class Tied(nn.Module):
    """A tied embedding, running statistics, a scalar, a frozen bias, a weight in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 24)
        self.hidden = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 24))
        self.convolution = nn.Conv2d(6, 6, 2).to(memory_format=torch.channels_last)
        self.output = nn.Linear(24, 10)
        self.output.weight = self.embedding.weight
        self.output.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding((x.abs() * 10).long() % 10).mean(1)
        h = h + self.convolution(h.view(-1, 6, 2, 2)).repeat(1, 1, 2, 2).flatten(1)
        return self.output(self.hidden(h) * self.scale)[:, :4]


class Rare(nn.Module):
    """A layer that only the first of two micro-batches uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.first(x)
        return self.last(x + self.rare(x) if self.calls % 2 else x)


class Of(Toy):
    def __init__(self, net: Callable[[], nn.Module] | None) -> None:
        super().__init__(width=40, depth=3, dropout=0.1)
        self.net = net

    def model(self) -> nn.Module:
        return self.net() if self.net else super().model()


class Track(Callback):
    """The weights after each step, and the model's buffers."""

    role = Role.MEASURE

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def on_step_end(self, trainer) -> None:
        tensors = [*trainer.module.parameters(), *trainer.module.buffers()]
        self.seen.append(b"".join(t.detach().numpy().tobytes() for t in tensors))


CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": partial(adamw, weight_decay=0.3)},
    "sgd": {"optimizer": partial(sgd, nesterov=True), "net": Tied},
    "accumulate": {"accumulate": 2, "net": Tied},
    "rare": {"accumulate": 2, "net": Rare},
    "bf16": {"precision": "bf16"},
    "groups": {"optimizer": WithGroups(adamw, [{"match": "blocks.*", "lr_scale": 0.1}])},
    "topk": {"others": lambda: {"grad_compress": GradCompress("topk", density=0.3)}},
    "hierarchical": {"others": lambda: {"hierarchical": Hierarchical(ranks_per_node=1)}},
}
ALONE = ("adamw", "accumulate", "bf16", "groups", "rare")  # what differs on one rank
SEVERAL = [case for case in CASES if case != "rare"]  # on several ranks an error
RESUMED = ("accumulate", "topk")


def train(place: Place, case: str, in_backward: bool, resume: str | None = None) -> list[bytes]:
    setting, track, run = CASES[case], Track(), f"{case}-{in_backward}-{place.world}" + "-on" * bool(resume)
    own = {"optimizer_in_backward": OptimizerInBackward()} if in_backward else {}
    trainer = Trainer(
        Of(setting.get("net")), {"track": track, **setting.get("others", dict)(), **own},
        setting.get("optimizer", adamw), Linear(warmup=2), batch=12, accumulate=setting.get("accumulate"),
        options=Options(
            max_steps=STEPS, validate_every=2, precision=setting.get("precision", "fp32"), log_every_steps=1,
            run_dir=f"runs/{run}", checkpoint=CheckpointOptions(every_steps=2), ddp=DDPOptions(0.002), resume=resume,
        ),
        data=DataOptions(workers=0), place=replace(place, store=f"{place.store}-{run}"),
    )  # fmt: skip
    trainer.fit()
    assert all(p.grad is None for p in trainer.module.parameters())
    return track.seen


def train_all(place: Place) -> dict[str, list[list[bytes]]]:
    found = {}
    for case in SEVERAL if place.world > 1 else ALONE:
        found[case] = [train(place, case, False), train(place, case, True)]
        if case in RESUMED:
            found[case].append(train(place, case, True, f"ckpt/{case}-True-{place.world}/step-00000002"))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, list[dict[str, list[list[bytes]]]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        found = {world: run_ranks(world, train_all, timeout_s=300) for world in (1, 3)}
        files = {str(path): path.read_bytes() for path in Path("ckpt").glob("*/step-0000000*/*.safetensors")}
    for name, content in files.items():
        if "-True-" in name and "-on" not in name:
            assert content == files[name.replace("-True-", "-False-")], name
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("world", "case"), [*((1, case) for case in ALONE), *((3, case) for case in SEVERAL)])
def test_bits_are_those_without_it_and_of_a_resume(runs, world, case):
    for rank in runs[world]:
        plain, ours, *resumed = rank[case]
        assert ours == plain and all(own == plain[2:] for own in resumed)
        assert len(set(plain)) == STEPS  # it did train


class Wide(nn.Sequential):
    """Seven equal matrices."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8, bias=False) for _ in range(6)), nn.Linear(8, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :4]


SIZE = 8 * 8 * 4  # bytes of each


class Held(Callback):
    """The most bytes of gradients and of buckets that are alive, whoever holds them, during backward passes.

    A reduction takes longer than the rest of a backward pass, so that as many buckets wait as may.
    """

    role = Role.REDUCE

    def __init__(self) -> None:
        self.most, self.alive = 0, dict[StorageWeakRef, int]()  # a tensor that only C++ holds has no weakref
        self.lock = threading.Lock()

    def wrap_reduce(self, trainer, reduce):
        self.trainer = trainer

        def counted(flat, bucket):
            self.note(flat)
            time.sleep(0.02)
            return reduce(flat, bucket)

        return counted

    def on_fit_start(self, trainer) -> None:
        self.trainer, self.most = trainer, 0
        self.hooks = [p.register_post_accumulate_grad_hook(lambda _: self.note()) for p in trainer.parameters]

    def on_step_end(self, trainer) -> None:
        self.note()

    def note(self, *buckets: Tensor) -> None:
        with self.lock:
            gradients = [grad for p in self.trainer.parameters if (grad := p.grad) is not None]
            self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
            self.alive |= {StorageWeakRef(t.untyped_storage()): t.nbytes for t in (*gradients, *buckets)}
            self.most = max(self.most, sum(self.alive.values()))


def held(place: Place, in_backward: bool, accumulate: int) -> int:
    """In matrices."""
    watch, run = Held(), f"{place.world}-{in_backward}-{accumulate}"
    trainer = Trainer(
        Of(Wide), {"held": watch, **({"optimizer_in_backward": OptimizerInBackward()} if in_backward else {})}, sgd,
        batch=12, accumulate=accumulate, data=DataOptions(workers=0), place=place,
        options=Options(max_steps=3, ddp=DDPOptions(SIZE / 2**20), run_dir=f"runs/{run}"),
    )  # fmt: skip
    take = Buckets.take_gradients

    def noted(bucket: Buckets, flat: Tensor) -> None:
        watch.note(flat)  # it may wait long until it is reduced
        take(bucket, flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "take_gradients", noted)
        trainer.fit()
    assert watch.most % SIZE == 0
    return watch.most // SIZE


def all_held(place: Place) -> list[int]:
    cases = [(False, 1), (True, 1), (True, 2)]
    return [held(replace(place, store=f"{place.store}-{case}"), *case) for case in cases]


def test_bytes_of_gradients(tmp_path):
    """On three ranks: the buckets on their way, the one that is filled, and the gradient that is complete meanwhile.

    The observer's hooks come before the callback's, so it sees each gradient whole.
    """
    (alone,) = run_ranks(1, all_held)
    assert alone == [7, 1, 7], alone
    for plain, ours, accumulated in run_ranks(3, all_held):
        assert plain == 14, plain
        assert MOST_SENT + 1 <= ours <= MOST_SENT + 2 and 7 <= accumulated <= 7 + MOST_SENT, (ours, accumulated)


class Skips(nn.Module):
    """A layer that only the first passes use, and a weight that backward needs again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.first(x)
        if self.kind == "detached":  # the first layer's gradient needs it after its own gradient is complete
            x = nn.functional.linear(x, self.last.weight.detach()).repeat(1, 2)
        return self.last(x if self.kind == "unused" and self.calls > 2 else x + self.second(x))


def fails(place: Place, kind: str) -> str:
    trainer = Trainer(
        Of(partial(Skips, kind)), {"optimizer_in_backward": OptimizerInBackward()}, adamw, batch=12, place=place,
        options=Options(max_steps=3, run_dir=f"runs/{place.world}"), data=DataOptions(workers=0),
    )  # fmt: skip
    try:
        trainer.fit()
    except (RuntimeError, ConfigError) as error:
        return str(error)
    return ""


def test_a_parameter_without_a_gradient_is_an_error_on_several_ranks(tmp_path):
    told = "optimizer_in_backward: no gradient for second.weight, second.bias in the last micro-batch of a step"
    assert [error.partition(";")[0] for error in run_ranks(3, fails, "unused")] == [told] * 3
    assert run_ranks(1, fails, "unused") == [""]


def test_a_weight_that_backward_needs_after_its_step_is_an_error(tmp_path):
    (error,) = run_ranks(1, fails, "detached")
    assert "modified by an inplace operation" in error


class Twice(Toy):
    """Runs a backward pass of its own."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        if loss.requires_grad:
            loss.backward()
        return super().loss(model, batch)


def test_a_second_gradient_is_an_error(tmp_path):
    trainer = Trainer(
        Twice(), {"optimizer_in_backward": OptimizerInBackward()}, adamw, batch=12, options=Options(max_steps=2),
        data=DataOptions(workers=0),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"optimizer_in_backward: \w+\S* has a second gradient in a step"):
        trainer.fit()


class Sharded(Callback):
    role = Role.SHARD

    def distribute(self, trainer, model):
        parameters = [p for p in model.parameters() if p.requires_grad]
        return SimpleNamespace(model=model, parameters=parameters, data_rank=0, data_world=1)


def test_a_layout_other_than_ddps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks\.optimizer_in_backward: needs whole gradients .*SimpleNamespace"):
        Trainer(Toy(), {"a": Sharded(), "optimizer_in_backward": OptimizerInBackward()}, batch=12)


@pytest.mark.parametrize("feature", ["clip", "clip_value", "fp16", "find_unused_parameters", "static_graph"])
def test_what_needs_all_gradients_at_once_is_refused_by_name(feature):
    told = f"^optimizer_in_backward and {feature} can't run together: .*; (set|use) .* leave optimizer_in_backward out$"
    with pytest.raises(ConfigError, match=told):
        arrange({"optimizer_in_backward": OptimizerInBackward()}, {feature})


def test_ddps_own_order_is_needed_by_delayed():
    with refuses("bucket and optimizer_in_backward can't run together", "delayed needs DDP's"):
        arrange({"optimizer_in_backward": OptimizerInBackward(), "bucket": Bucket(delayed=["*bias"])}, set())
