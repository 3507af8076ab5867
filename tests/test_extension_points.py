"""Doubles that do what later callbacks will do at each extension point: the numbers stay those of plain training."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.messages import refuses
from support.ranks import run_ranks
from torch import Tensor, nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.comm.ranks import Ranks
from trainer.composition import arrange
from trainer.config.options import DataOptions, Options
from trainer.context import Context
from trainer.data.bad_samples import Bad
from trainer.data.batch import Micro, Split, Step
from trainer.errors import ConfigError
from trainer.parallel.ddp import DDP
from trainer.parallel.forward_backward import ForwardBackward
from trainer.parallel.strategy import Strategy
from trainer.precision import Precision
from trainer.process.environment import Place
from trainer.trainer import Trainer
from trainer.validation import Evaluator

STEPS, WORLD = 4, 3


class Lockstep(DDP):
    """Copies of the model whose forward pass needs all ranks, as that of sharded parameters does."""

    lockstep = True

    def __init__(self, trainer: Context, model: nn.Module) -> None:
        super().__init__(model, trainer.rank, trainer.world, trainer.device, trainer.ddp, None, lambda: trainer.step)
        self.group = trainer.ranks.new_group()
        self.passes = 0
        model.register_forward_pre_hook(self._meet)

    def _meet(self, *_: Any) -> None:
        self.passes += 1
        dist.all_reduce(torch.ones(1), group=self.group)


class Sharded(Callback):
    """Builds the model on the meta device, and gives it memory where it is distributed."""

    role = Role.SHARD

    def build_model(self, trainer, build: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("meta"):
            return build()

    def distribute(self, trainer, model: nn.Module) -> Strategy:
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device=trainer.device)
        torch.manual_seed(trainer.options.seed)
        model.load_state_dict(trainer.recipe.model().state_dict())
        self.strategy = Lockstep(trainer, model)
        return self.strategy


class Staged(Callback):
    """Gives all ranks the same samples, as the stages of a pipeline have them."""

    role = Role.SHARD

    def distribute(self, trainer, model: nn.Module) -> Strategy:
        strategy = DDP(model, trainer.rank, trainer.world, trainer.device, trainer.ddp, None, lambda: trainer.step)
        strategy.data_rank, strategy.data_world = 0, 1
        return strategy

    def on_step_end(self, trainer) -> None:
        assert trainer.weight == sum(trainer.data.weights)


class Timer(Callback):
    """Times data and passes, as a step timer would."""

    role = Role.MEASURE

    def __init__(self) -> None:
        self.wait_s: list[float] = []
        self.pass_s: list[float] = []
        self.rehearsed = 0

    def wrap_batches(self, trainer, steps: Iterator[Step]) -> Iterator[Step]:
        while True:
            began = time.monotonic()
            step = next(steps)
            self.wait_s.append(time.monotonic() - began)
            yield step

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        def timed(data: Step, total: Callable[[], int]) -> list[Tensor]:
            began = time.monotonic()
            losses = run(data, total)
            self.pass_s.append(time.monotonic() - began)
            return losses

        return timed

    def rehearse(self, trainer, run_pass: Callable[[Any], None], batch: Any) -> None:
        before, timed = [p.detach().clone() for p in trainer.parameters], len(self.pass_s)
        run_pass(batch)
        run_pass({name: tensor[:1] for name, tensor in batch.items()})  # as a search for the largest batch does
        assert len(self.pass_s) == timed + 2  # they go through `wrap_forward_backward`
        assert trainer.rehearsing and all(map(torch.equal, before, trainer.parameters))
        self.rehearsed += 1


class Unequal(Callback):
    """Gives the ranks 1 : 2 : 5 of a batch, and even shares from the third step on."""

    role = Role.BATCH

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.refs: list[tuple[int, int]] = []

    def split(self, trainer, position: int) -> Split:
        even = position >= 2 * trainer.batch
        return Split(trainer.batch, (8, 8, 8) if even else (3, 6, 15), accumulate=2 if even else 3)

    def on_step_end(self, trainer) -> None:
        self.sizes.append(len(trainer.data.refs))
        self.refs += [(ref.epoch, ref.shard) for ref in trainer.data.refs]


def train(place: Place, double: str, steps: int = STEPS) -> tuple[list[Any], dict[str, float], list[int]]:
    """What comes of it: the weights, the metrics of validation, and what the double counts."""
    callbacks: dict[str, dict[str, Callback]] = {
        "": {},
        "still": {},
        "sharded": {"shard": Sharded()},
        "staged": {"shard": Staged()},
        "timer": {"timer": Timer()},
        "unequal": {"unequal": Unequal()},
    }
    trainer = Trainer(
        Toy(dropout=0.0 if double in ("unequal", "still") else 0.1),
        callbacks[double],
        batch=24,
        accumulate=2,
        options=Options(max_steps=steps, clip_norm=1.0, validate_every=2, timeout_s=20.0),
        data=DataOptions(workers=0),
        place=place,
    )
    trainer.fit()
    counts: list[int] = []
    for callback in callbacks[double].values():
        if isinstance(callback, Sharded):
            counts = [callback.strategy.passes]
        elif isinstance(callback, Unequal):
            counts = [*callback.sizes, *(number for ref in callback.refs for number in ref)]
        elif isinstance(callback, Timer):
            counts = [len(callback.wait_s), len(callback.pass_s), callback.rehearsed]
    return [p.detach().numpy() for p in trainer.module.parameters()], trainer.validation, counts


@pytest.fixture
def plain(tmp_path):
    return run_ranks(WORLD, train, "")


def test_a_model_from_the_meta_device_whose_ranks_pass_in_lockstep(plain):
    """13 validation samples are 2, 1 and 1 micro-batches of the ranks: each makes 2 forward passes. Two of training a
    step, two validations, two of the rehearsal."""
    sharded = run_ranks(WORLD, train, "sharded")
    for (weights, metrics, counts), (expected, numbers, _) in zip(sharded, plain, strict=True):
        assert all((a == b).all() for a, b in zip(weights, expected, strict=True))
        assert metrics == numbers
        assert counts == [2 + 2 * STEPS + 2 * 2]


def test_a_timer_sees_each_step_and_changes_no_bit(plain):
    for (weights, _, counts), (expected, _, _) in zip(run_ranks(WORLD, train, "timer"), plain, strict=True):
        assert all((a == b).all() for a, b in zip(weights, expected, strict=True))
        assert counts == [STEPS, 2 + 2 + STEPS, 1]  # two passes of DDP's rehearsal, two of its own


def test_unequal_shares_that_change_during_a_run(plain, tmp_path):
    """The mean is as exact, and every sample of the epoch is trained on once."""
    unequal = run_ranks(WORLD, train, "unequal")
    for rank, (weights, _, counts) in enumerate(unequal):
        assert counts[:STEPS] == [(3, 6, 15)[rank]] * 2 + [8] * 2
        assert all((a == b).all() for a, b in zip(weights, unequal[0][0], strict=True))
    numbers = [counts[STEPS:] for _, _, counts in unequal]
    seen = sorted(ref for own in numbers for ref in zip(own[::2], own[1::2], strict=True))
    assert seen == [(0, shard) for shard in range(96)]
    for own, expected in zip(unequal[0][0], run_ranks(WORLD, train, "still")[0][0], strict=True):
        assert abs(own - expected).max() < 1e-6


def test_ranks_that_read_the_same_samples_count_them_once(tmp_path):
    """Random numbers are those of the data's rank: dropout is the same on all."""
    (alone,) = run_ranks(1, train, "")
    for weights, _, _ in run_ranks(WORLD, train, "staged"):
        for own, expected in zip(weights, alone[0], strict=True):
            assert abs(own - expected).max() < 1e-6


class Deaf(Callback):
    """Runs passes without the total weight of the step."""

    def wrap_forward_backward(self, trainer, run: ForwardBackward) -> ForwardBackward:
        return lambda data, total: run(data, lambda: 24)

    def on_step_end(self, trainer) -> None:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_passes_without_the_total_weight_keep_the_ranks_together(tmp_path):
    ends = run_ranks(WORLD, end_of, Deaf())
    assert len({step for step, _ in ends} & {3, 4}) == 1 and len({weight for _, weight in ends} - {0}) == 1


def end_of(place: Place, callback: Callback) -> tuple[int, int]:
    options = Options(max_steps=9, timeout_s=20.0)
    trainer = Trainer(Toy(), {"one": callback}, batch=24, options=options, data=DataOptions(workers=0), place=place)
    trainer.fit()
    return trainer.step, trainer.weight


class Larger(Unequal):
    def split(self, trainer, position: int) -> Split:
        return Split(2 * trainer.batch)


def test_a_split_is_one_of_the_batch(tmp_path):
    trainer = Trainer(Toy(), {"larger": Larger()}, batch=24, options=Options(max_steps=2))
    with refuses("split", "samples=48", "batch=24"):
        trainer.fit()


def validate_in_lockstep(place: Place) -> dict[str, float] | None:
    """The last rank's first batch has bad samples alone."""
    ranks = Ranks(place, "cpu", "gloo", 20.0)
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    model.register_forward_pre_hook(lambda *_: dist.all_reduce(torch.ones(1)) and None)
    batches = [Micro(torch.full((1, 1), 2.0), 1, [], []), Micro(torch.full((1, 1), 4.0), 1, [], [])]
    if ranks.rank == ranks.world - 1:
        batches.insert(1, Micro(None, 0, [], [Bad(None, "why", "shard", "key")]))  # pyright: ignore[reportArgumentType]

    class Recipe:
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).mean()

    found = Evaluator(
        Recipe(), "val", {"val": lambda: iter(batches)}, ranks, Precision("fp32", torch.device("cpu")), samples=7,
        max_bad=0.5, replicas=None, lockstep=True, data_rank=ranks.rank, stopping=lambda: False, beat=lambda: None,
    ).evaluate(model)  # fmt: skip
    ranks.leave()
    return found


def test_a_batch_of_bad_samples_keeps_the_ranks_in_lockstep():
    for found in run_ranks(WORLD, validate_in_lockstep):
        assert found == {"val/loss": 3.0}


def test_distribute_and_split_are_of_their_roles():
    class Watches(Unequal):
        role = Role.OBSERVE

    with refuses("one has the hook split", "BATCH"):
        arrange({"one": Watches()}, set())


def test_a_callback_may_work_beside_one_that_fills_its_role():
    class Splits(Sharded):
        role, also = Role.SPLIT, (Role.SHARD,)

    class Works(Callback):
        role, shares_with = Role.SHARD, frozenset({Role.SPLIT})

    assert list(arrange({"one": Works(), "two": Splits()}, set())) == ["two", "one"]
    for other in (Sharded(), Works()):
        with pytest.raises(ConfigError, match="both decide how parameters and gradients are laid out"):
            arrange({"one": Works(), "two": other}, set())


def test_only_the_role_that_shards_distributes():
    """Two would each lay the model out."""
    with pytest.raises(ConfigError, match="both decide how parameters and gradients are laid out"):
        arrange({"one": Sharded(), "two": Sharded()}, set())
