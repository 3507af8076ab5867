"""The network against the paper's formula, sample by sample, and its size against MLPerf's."""

import pytest
import torch
from torch import nn

from recipes.dlrm import DLRM

ROWS, BOTTOM, TOP = [7, 3, 5], [6, 4], [8]
MLPERF = [39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10]
MLPERF += [2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36]


def test_the_logit_is_the_papers() -> None:
    torch.manual_seed(0)
    model = DLRM(13, ROWS, BOTTOM, TOP, sparse_gradients=False)
    dense, categories = torch.randn(5, 13), torch.stack([torch.randint(rows, (5,)) for rows in ROWS], 1)
    found = model(dense, categories)
    assert found.shape == (5,)
    for own, rows, logit in zip(dense, categories, found, strict=True):
        z = own
        for layer in model.bottom:
            z = layer(z)
        vectors = [z, *(model.get_parameter(f"embeddings.{i}.weight")[row] for i, row in enumerate(rows))]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        z = torch.cat([z, torch.stack(products)])
        for layer in model.top:
            z = layer(z)
        assert float(logit.detach()) == pytest.approx(float(z.detach()), abs=1e-6)


def test_mlperfs_network_has_its_parameters() -> None:
    """Sizes of MLPerf Training 1.0: the first layer of the top has 128 + 27 * 26 / 2 = 479 inputs."""
    with torch.device("meta"):
        model = DLRM(13, MLPERF, [512, 256, 128], [1024, 1024, 512, 256], sparse_gradients=False)
    widths = [(13, 512), (512, 256), (256, 128), (479, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    expected = sum(a * b + b for a, b in widths) + 128 * sum(MLPERF)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert len(model.state_dict()) == 2 * len(widths) + 26


def test_starting_values() -> None:
    torch.manual_seed(0)
    model = DLRM(13, [10_000], [256, 64], [64], sparse_gradients=False)
    table = model.get_parameter("embeddings.0.weight")
    assert table.abs().max() <= 0.01 and float(table.detach().std()) == pytest.approx(0.01 / 3**0.5, rel=0.02)
    first = model.bottom[0]
    assert isinstance(first, nn.Linear) and float(first.weight.detach().std()) == pytest.approx(
        (2 / 269) ** 0.5, rel=0.05
    )
    assert isinstance(model.top[-1], nn.Linear)
