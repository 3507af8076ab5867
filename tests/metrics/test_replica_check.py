"""Ranks whose weights differ, be it by a bit, end the run within so many steps; those that are meant to do not."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.overlap.callback import Overlap
from trainer.config.options import DataOptions, Options
from trainer.errors import NumericsError
from trainer.metrics import replica_check
from trainer.metrics.replica_check import checksum
from trainer.parallel.ddp import DDP
from trainer.parallel.strategy import Strategy
from trainer.process.environment import Place
from trainer.trainer import Trainer

pytestmark = pytest.mark.usefixtures("tmp_path")


class Perturb(Callback):
    """One bit of one weight, on some ranks."""

    def __init__(self, ranks: list[int], at: int) -> None:
        self.ranks, self.at = ranks, at

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.at and trainer.rank in self.ranks:
            weight = trainer.module.get_parameter("last.weight").detach().view(-1)
            weight.view(torch.int32)[5] ^= 1


def train(
    place: Place, every: int | None, ranks: list[int], more: dict[str, Callback] | None = None
) -> tuple[int, str, int]:
    """The step at which it ended, why, and how often it has looked at a tensor."""
    trainer = Trainer(
        Toy(), {"perturb": Perturb(ranks, at=5), **(more or {})}, batch=12, place=place, data=DataOptions(workers=0),
        options=Options(max_steps=9, run_dir="runs/r", check_replicas_every=every),
    )  # fmt: skip
    said = ""
    with patch.object(replica_check, "checksum", wraps=replica_check.checksum) as looked:
        try:
            trainer.fit()
        except NumericsError as error:
            said = str(error)
            trainer.close()
    return trainer.step, said, looked.call_count


@pytest.mark.parametrize("more", [{}, {"overlap": Overlap()}], ids=["plain", "overlap"])
def test_one_bit_on_one_rank_ends_all_at_the_next_look(more):
    for step, said, _ in run_ranks(3, train, 4, [2], more):
        assert step == 8
        assert said == (
            "trainer.check_replicas_every=4: after step 8 the weights of rank 2 differ from those of most ranks, "
            "last.weight first; find code that changes weights on some ranks only, or check the hardware, and resume "
            "an earlier checkpoint"
        )


def test_also_where_it_is_rank_0():
    assert all("the weights of rank 0 differ" in said for _, said, _ in run_ranks(3, train, 1, [0]))


def test_the_steps_between_cost_nothing(tmp_path, monkeypatch):
    said = {}
    for every in (None, 4):
        (folder := tmp_path / str(every)).mkdir()
        monkeypatch.chdir(folder)
        (step, why, said[every]), *_ = run_ranks(3, train, every, [])
        assert (step, why) == (9, "")
    assert said == {None: 0, 4: 2 * len(list(Toy().model().parameters()))}


@pytest.mark.slow
def test_where_ranks_are_meant_to_differ_none_looks():
    assert all(said == "" for _, said, _ in run_ranks(3, train, 1, [2], {"local_sgd": LocalSGD(every=3)}))
    log = Path("runs/r/logs/rank0.log").read_text()
    assert (
        log.count("local_sgd: ranks have different weights from now on; trainer.check_replicas_every does nothing\n")
        == 1
    )


@pytest.mark.slow
def test_before_they_part_they_are_looked_at():
    ends = run_ranks(3, train, 1, [2], {"local_sgd": LocalSGD(every=3, warmup_steps=6)})
    assert all("after step 5 the weights of rank 2" in said for _, said, _ in ends)


class Stages(Callback):
    """Gives ranks 0 and 1 other weights than ranks 2 and 3, as two stages with two replicas each have them."""

    role = Role.SHARD

    def distribute(self, trainer, model: nn.Module) -> Strategy:
        replicas = trainer.ranks.new_groups([[0, 1], [2, 3]])
        nn.init.constant_(next(model.parameters()), 1 + trainer.rank // 2)
        arguments = trainer.ddp | {"process_group": replicas}
        strategy = DDP(model, trainer.rank % 2, 2, trainer.device, arguments, None, lambda: trainer.step)
        strategy.replicas = replicas
        return strategy


def test_only_ranks_of_the_same_weights_are_compared():
    assert [said for _, said, _ in run_ranks(4, train, 1, [], {"stages": Stages()})] == [""] * 4


class OneAlone(Callback):
    """Gives rank 0 weights that no other rank has."""

    role = Role.SHARD

    def distribute(self, trainer, model: nn.Module) -> Strategy:
        replicas = trainer.ranks.new_groups([[0], [1, 2]])
        arguments = trainer.ddp | {"process_group": replicas}
        strategy = DDP(model, trainer.rank, 3, trainer.device, arguments, None, lambda: trainer.step)
        strategy.replicas = replicas if trainer.rank else None
        return strategy


def test_a_rank_without_a_replica_hears_of_the_others():
    ends = run_ranks(3, train, 1, [2], {"alone": OneAlone()})
    assert all("after step 5 the weights of rank 2 differ" in said for _, said, _ in ends)


def test_a_rank_that_differs_from_its_replica_is_named():
    ends = run_ranks(4, train, 1, [3], {"stages": Stages()})
    assert all("after step 5 the weights of rank 3 differ" in said for _, said, _ in ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_a_checksum_tells_every_bit(dtype):
    plain = torch.arange(12).reshape(3, 4).to(dtype)
    for bit in range(8 * plain.nbytes):
        other = plain.clone()
        other.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksum(other).item() != checksum(plain).item()
    assert checksum(plain.t()).item() == checksum(plain.t().contiguous()).item()
    assert checksum(plain[0, 0]).shape == checksum(plain[:0]).shape == ()
