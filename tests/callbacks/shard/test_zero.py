"""Stage 1's checkpoints: any stage and number of ranks resumes any other, with plain training's bits."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.quick import quick
from support.ranks import run_ranks
from support.runs import make
from toy_recipe import Toy

from trainer.callbacks.ema import EMA
from trainer.callbacks.shard.callback import Shard
from trainer.checkpoint.pretrained import load_weights
from trainer.checkpoint.serialize import optimizer_state
from trainer.optim.factories import adamw, lamb
from trainer.process.environment import Place

pytestmark = pytest.mark.usefixtures("tmp_path")

HALF, END = 3, 6
Bits = dict[str, bytes]


def train(place: Place, stage: int, run: str, steps: int, resume: str | None = None, optimizer: Any = adamw) -> Bits:
    """The weights, the average, and the optimizer's state, as far as this rank has it."""
    trainer = make(
        Toy(width=24, dropout=0.1), {"ema": EMA(0.8), **({"shard": Shard(stage)} if stage else {})},  # pyright: ignore
        optimizer, batch=24, place=replace(place, store=f"{place.store}-{run}-{steps}"), max_steps=steps,
        run_dir=f"runs/{run}", resume=resume, log_every_steps=1, clip_norm=0.5, check_replicas_every=1,
        checkpoint={"every_steps": HALF, "keep": 9},
    )  # fmt: skip
    trainer.fit()
    found = {name: p.detach().numpy().tobytes() for name, p in trainer.module.named_parameters()}
    found |= {f"ema {name}": p.numpy().tobytes() for name, p in trainer.eval_model.named_parameters()}
    for name, state in optimizer_state(trainer.optimizer, trainer.module).items():
        found |= {f"{name}/{key}": torch.as_tensor(value).numpy().tobytes() for key, value in state.items()}
    return found


def all_of(ranks: list[Bits]) -> Bits:
    """What ranks have together; what several have must be equal."""
    found: Bits = {}
    for rank in ranks:
        assert all(found[key] == value for key, value in rank.items() if key in found)
        found |= rank
    return found


def stored(run: str) -> dict[str, torch.Tensor]:
    return load_file(f"ckpt/{run}/step-{HALF:08d}/optimizer.safetensors")


@pytest.mark.parametrize("optimizer", quick([adamw, lamb]))
def test_each_rank_writes_its_own_state_and_rank_0_plains_weights(optimizer):
    run_ranks(3, train, 1, "r", HALF, None, optimizer)
    run_ranks(3, train, 0, "p", HALF, None, optimizer)
    folder, plain = Path(f"ckpt/r/step-{HALF:08d}"), Path(f"ckpt/p/step-{HALF:08d}")
    assert (folder / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert (folder / "callbacks.safetensors").read_bytes() == (plain / "callbacks.safetensors").read_bytes()
    assert json.loads((folder / "state.json").read_text())["optimizer"] == {}
    assert not (folder / "optimizer.safetensors").exists()
    parts = [load_file(folder / f"part-{rank:05d}.safetensors") for rank in range(3)]
    names = [json.loads((folder / f"part-{rank:05d}.json").read_text()) for rank in range(3)]
    assert [len(one[f"part-{rank:05d}"]["optimizer"]) for rank, one in enumerate(names)] == [
        len({name.rsplit("/", 1)[0] for name in part}) for part in parts
    ]
    own = stored("p")
    assert sorted(name for part in parts for name in part) == sorted(f"optimizer/{name}" for name in own)
    for name, tensor in {name: tensor for part in parts for name, tensor in part.items()}.items():
        assert torch.equal(tensor, own[name.removeprefix("optimizer/")])
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(sizes) < 0.5 * sum(sizes) and sum(sizes) == sum(tensor.nbytes for tensor in own.values())


# What wrote, on how many ranks; what goes on, on how many.
QUICK = [(1, 3, 0, 3), (0, 3, 1, 3)]
MOVES = [*QUICK, (2, 4, 1, 2), (1, 3, 1, 3), (1, 4, 2, 2), (1, 3, 0, 1), (0, 1, 2, 3), (2, 3, 2, 3)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Callable[[int, int], Bits]:
    """A plain run: `HALF` steps on so many ranks, the rest on as many or others."""

    @cache
    def train_both(ranks: int, then: int) -> Bits:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("plain"))
            run_ranks(ranks, train, 0, "r", HALF)
            return all_of(run_ranks(then, train, 0, "r", END, "ckpt/r"))

    return train_both


@pytest.mark.parametrize(
    ("wrote", "ranks", "reads", "then"),
    [pytest.param(*move, marks=() if move in QUICK else pytest.mark.slow) for move in MOVES],
)
def test_any_stage_resumes_any_other_on_any_number_of_ranks(straight, wrote, ranks, reads, then):
    run_ranks(ranks, train, wrote, "r", HALF)
    assert all_of(run_ranks(then, train, reads, "r", END, "ckpt/r")) == straight(ranks, then)


def test_an_uninterrupted_run_has_the_bits_of_a_resumed_one():
    whole = run_ranks(3, train, 1, "w", END)
    run_ranks(3, train, 1, "r", HALF)
    assert run_ranks(3, train, 1, "r", END, "ckpt/r") == whole


def refused(place: Place) -> str:
    try:
        train(place, 1, "r", END, "ckpt/r")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_lost_file_of_a_rank_is_named():
    run_ranks(3, train, 1, "r", HALF)
    Path(f"ckpt/r/step-{HALF:08d}/part-00002.safetensors").unlink()
    told = run_ranks(3, refused)[0]
    assert "part-00002.safetensors: is missing" in told and told.startswith("Damaged")


def test_weights_alone_are_loaded_as_from_a_plain_checkpoint():
    bits = run_ranks(3, train, 1, "r", HALF)[0]
    model = Toy(width=24).model()
    load_weights(model, "ckpt/last.pt")
    assert {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}.items() <= bits.items()
