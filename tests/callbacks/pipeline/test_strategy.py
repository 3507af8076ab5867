"""The strategy alone: who saves what, the global norm, the forward pass of validation."""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from trainer.callbacks.pipeline.stages import drop_others
from trainer.callbacks.pipeline.strategy import Pipeline, pipeline_mesh
from trainer.comm.ranks import Ranks
from trainer.data.batch import Split
from trainer.errors import ConfigError
from trainer.parallel.layout import Layout, holders
from trainer.parallel.strategy import OutputElsewhere, clip_gradients
from trainer.process.environment import Place

WIDTH = 5


class Counted(nn.Module):
    """A layer with a buffer, and one that no checkpoint has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("number", torch.tensor(float(number)))
        self.register_buffer("hidden", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.number * self.hidden  # pyright: ignore


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(Counted(i + 1) for i in range(4))
        self.head = nn.Linear(WIDTH, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def build(place: Place, stages: int, v: bool = False) -> tuple[Pipeline, Ranks]:
    torch.manual_seed(0)
    model = Tied()
    ranks = Ranks(place, "cpu", "gloo", 20.0)
    layout = Layout((0, 1, 2, 3) if v else (0, 1, 3)[:stages], 4, stages, v)
    uses = holders(model, list(model.layers), layout)
    mesh = pipeline_mesh(ranks, stages)
    own = {name for name, found in uses.items() if set(found) & set(layout.of(mesh.place["stage"]))}
    drop_others(model, own, torch.device("cpu"))
    pipeline = Pipeline(
        model, list(model.layers), layout, uses, mesh, split=Split(4, ranks.world // stages, 2), schedule="gpipe",
        reduce=None, expected=None, seed=0, step=lambda: 0, device=torch.device("cpu"),
    )  # fmt: skip
    return pipeline, ranks


def parts(place: Place, stages: int, v: bool) -> dict[str, list[str]]:
    pipeline, ranks = build(place, stages, v)
    optimizer = torch.optim.AdamW(pipeline.parameters)
    found = {name: sorted(section) for name, section in pipeline.save(optimizer).items()}
    ranks.leave()
    return found


@pytest.mark.parametrize(("world", "stages", "v"), [(3, 3, False), (4, 2, False), (2, 2, True)])
def test_each_value_is_saved_by_one_rank(world: int, stages: int, v: bool):
    ranks = run_ranks(world, parts, stages, v)
    model = Tied()
    assert sorted(key for rank in ranks for key in rank["model"]) == sorted(model.state_dict())
    assert sorted(key for rank in ranks for key in rank["optimizer"]) == sorted(n for n, _ in model.named_parameters())
    assert {"embed.weight", "head.weight", "norm.running_mean", "scale"} <= set(ranks[0]["model"])
    assert not any(rank["model"] for i, rank in enumerate(ranks) if i % (world // stages))


def norms(place: Place) -> tuple[float, list[Tensor]]:
    """Each parameter's gradient follows from its name, on all stages that have it."""
    pipeline, ranks = build(place, 3)
    for p, name in zip(pipeline.parameters, pipeline.names, strict=True):
        p.grad = gradient(name, p)
    total = pipeline.clip(0.5).item()
    ranks.leave()
    return total, [p.grad for p in pipeline.parameters if p.grad is not None]


def gradient(name: str, p: Tensor) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def test_the_norm_is_the_whole_models_bit_for_bit():
    named = dict(Tied().named_parameters())
    for name, p in named.items():
        p.grad = gradient(name, p)
    expected = clip_gradients(list(named.values()), 0.5).item()
    clipped = [p.grad for p in named.values() if p.grad is not None]
    for total, grads in run_ranks(3, norms):
        assert total == expected
        assert all(any(own.shape == one.shape and torch.equal(own, one) for one in clipped) for own in grads)


def validate(place: Place, stages: int, v: bool) -> list[Any]:
    pipeline, ranks = build(place, stages, v)
    pipeline.model.eval()
    found: list[Any] = []
    for rows in (6, 3, 1):  # of any size
        with torch.no_grad():
            try:
                found.append(pipeline.model(torch.arange(rows)).tolist())
            except OutputElsewhere:
                found.append(None)
    try:
        pipeline.model(torch.arange(3))
    except ConfigError as error:
        found.append(str(error))
    ranks.leave()
    return found


@pytest.mark.parametrize(("stages", "v", "last"), [(3, False, 2), (2, True, 0)])
def test_one_rank_gets_the_output_of_a_forward_pass(stages: int, v: bool, last: int):
    torch.manual_seed(0)
    model = Tied().eval()
    ranks = run_ranks(stages, validate, stages, v)
    for rank, found in enumerate(ranks):
        for rows, output in zip((6, 3, 1), found[:3], strict=True):
            assert output == (model(torch.arange(rows)).tolist() if rank == last else None)
        assert "runs forward in training through recipe.loss alone" in found[3]
