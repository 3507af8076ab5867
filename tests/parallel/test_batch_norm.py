"""SyncBatchNorm: what becomes of the layers and their names, and what is refused. tests/gpu has its numbers."""

import re

import pytest
import torch
from support.messages import refuses
from support.ranks import run_ranks
from torch import nn
from torch.optim.swa_utils import update_bn
from toy_recipe import Toy

from recipes.resnet import ResNet
from trainer.config.options import DataOptions, Options
from trainer.errors import ConfigError, DataError
from trainer.parallel.batch_norm import (
    across_ranks,
    average_statistics,
    cumulative,
    layers_with_statistics,
    normalises_by_batch,
    refuse_no_items,
)
from trainer.process.environment import Place
from trainer.trainer import Trainer

GPU = torch.device("cuda")


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def small() -> ResNet:
    return ResNet(classes=3, layers=(1, 1), width=2, small_stem=True)


def test_a_model_normalises_by_the_batch_unless_its_layers_are_frozen():
    model = small()
    assert normalises_by_batch(model) and not normalises_by_batch(model.eval())
    assert normalises_by_batch(nn.BatchNorm1d(2, track_running_stats=False).eval())
    assert not normalises_by_batch(nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))


def test_each_layer_is_converted_and_keeps_its_parameters_and_names():
    model = small()
    before, parameters, count = model.state_dict(), list(model.parameters()), len(norms(model))
    made = across_ranks(model, 2, GPU)
    assert [type(module) for module in norms(made)] == [nn.SyncBatchNorm] * count and count == 9
    after = made.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert all(one is other for one, other in zip(made.parameters(), parameters, strict=True))


def test_validation_has_the_numbers_of_batch_norm():
    model, x = small(), torch.randn(4, 3, 8, 8)
    model(x)  # running statistics other than 0 and 1
    expected = model.eval()(x)
    assert torch.equal(across_ranks(model, 2, GPU).eval()(x), expected)


def test_one_rank_keeps_its_layers():
    model = small()
    assert across_ranks(model, 1, torch.device("cpu")) is model and nn.SyncBatchNorm not in map(type, norms(model))


@pytest.mark.parametrize(
    ("model", "world", "device", "message"),
    [
        (small(), 2, "cpu", "torch has no SyncBatchNorm for the CPU; train on GPUs, or set it to false"),
        (nn.Linear(1, 1), 1, "cpu", "the model has no BatchNorm; leave it out"),
        (nn.Linear(1, 1), 2, "cuda", "the model has no BatchNorm; leave it out"),
    ],
)
def test_what_is_refused(model, world, device, message):
    with pytest.raises(ConfigError, match=rf"^trainer\.sync_batch_norm=true: {re.escape(message)}$"):
        across_ranks(model, world, torch.device(device))


def test_torch_still_has_none_for_the_cpu():
    """Else the refusal can go."""
    errors = run_ranks(2, forward, timeout_s=60)
    assert all("to be on GPU" in error for error in errors), errors


def forward(place: Place) -> str:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place.store}-sync", rank=place.rank, world_size=place.world
    )
    try:
        torch.distributed.barrier()  # else the first that fails cuts off the other, which still connects
        nn.SyncBatchNorm(2)(torch.randn(4, 2))
    except ValueError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return "it has one"


class WithNorm(Toy):
    def model(self) -> nn.Module:
        made = super().model()
        made.add_module("norm", nn.BatchNorm1d(2))
        return made


def train(place: Place) -> str:
    try:
        options = Options(max_steps=1, run_dir="runs/r", sync_batch_norm=True, accelerator="cpu")
        Trainer(WithNorm(), batch=12, options=options, data=DataOptions(workers=0), place=place)
    except ConfigError as error:
        return str(error)
    return "trains"


def test_ranks_on_cpus_are_refused_before_a_step(tmp_path):
    assert all("torch has no SyncBatchNorm for the CPU" in said for said in run_ranks(2, train, timeout_s=60))
    assert train(Place()) == "trains"


def test_a_micro_batch_without_items_is_refused():
    refuse_no_items(model := small())
    with refuses("trainer.sync_batch_norm=true", "BatchNorm", "trainer.sync_batch_norm=false", kind=DataError):
        refuse_no_items(across_ranks(model, 2, GPU))


def images(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(count)]


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return small().double()


def passes_over(place: Place, counts: list[int]) -> dict[str, torch.Tensor]:
    """The statistics, of which rank i has seen `counts[i]` batches."""
    torch.distributed.init_process_group("gloo", f"file://{place.store}", rank=place.rank, world_size=place.world)
    try:
        model, first = seeded(), sum(counts[: place.rank])
        layers = layers_with_statistics(model)
        with torch.no_grad(), cumulative(layers):
            for batch in images(sum(counts))[first : first + counts[place.rank]]:
                model(batch)
        average_statistics(layers, torch.distributed.group.WORLD)
        return dict(model.named_buffers())
    finally:
        torch.distributed.destroy_process_group()


def test_new_statistics_are_those_of_update_bn():
    model, other = seeded(), seeded()
    batches, layers = images(3), layers_with_statistics(model)
    assert len(layers) == 9
    other.load_state_dict(model.state_dict())
    update_bn(batches, other)
    with torch.no_grad(), cumulative(layers):
        for batch in batches:
            model(batch)
    average_statistics(layers, None)
    for (name, buffer), expected in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert {layer.momentum for layer in layers} == {0.1}


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 3, 0]])
def test_statistics_of_ranks_count_each_batch_the_same(counts):
    expected = seeded()
    update_bn(images(sum(counts)), expected)
    for found in run_ranks(3, passes_over, counts):
        for name, buffer in expected.named_buffers():
            torch.testing.assert_close(found[name], buffer, rtol=1e-12, atol=1e-12)
