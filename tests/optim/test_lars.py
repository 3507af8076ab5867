"""LARS against the paper's algorithm in NumPy."""

import numpy as np
import torch
from torch import nn

from trainer.optim.factories import lars


def plain_lars(w: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float, trust: float) -> None:
    """You et al. 2017, algorithm 1, line by line; in place."""
    v = np.zeros_like(w)
    for g, rate in zip(gradients, rates):
        lengths = np.sqrt((w * w).sum()), np.sqrt((g * g).sum())
        local = 1.0
        if w.ndim > 1 and lengths[0] > 0 and lengths[1] > 0:
            local = trust * lengths[0] / (lengths[1] + decay * lengths[0])
        v[...] = 0.9 * v + rate * local * (g + decay * w)
        w -= v


def test_lars_is_the_papers():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(5, 3)), np.zeros((4, 4)), rng.normal(size=(2, 3, 2)), rng.normal(size=7), np.zeros(3)]
    gradients = [[rng.normal(size=w.shape) * 10.0 ** rng.integers(-3, 2) for _ in range(30)] for w in weights]
    gradients[0][0][:] = 0.0
    decays, rates = [0.1, 0.1, 0.1, 0.0, 0.0], [0.5 * (30 - step) for step in range(30)]
    ours = [nn.Parameter(torch.tensor(w)) for w in weights]
    groups = [{"params": ours[:3], "weight_decay": 0.1}, {"params": ours[3:], "weight_decay": 0.0}]
    optimizer = lars(groups, trust_coefficient=0.02)
    for step in range(30):
        for p, gs in zip(ours, gradients):
            p.grad = torch.tensor(gs[step])
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
    for p, w, gs, decay in zip(ours, weights, gradients, decays):
        plain_lars(w, gs, rates, decay, 0.02)
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-9, atol=1e-12)


def test_a_matrix_moves_by_its_share_whatever_the_gradients_scale():
    """The first step at rate 1, without decay: `trust_coefficient` of the length."""
    for scale in (1e-4, 1.0, 1e4):
        p = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        before = p.detach().clone()
        optimizer = lars([{"params": [p]}], lr=1.0, weight_decay=0.0, trust_coefficient=0.01)
        p.grad = scale * torch.randn_like(p)
        optimizer.step()
        torch.testing.assert_close((p.detach() - before).norm(), 0.01 * before.norm())


def test_a_parameters_step_has_the_same_bits_whichever_others_step():
    """A rank of `shard` steps some. One of another dtype must not lend its precision to the others' norms."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(4, 4, generator=generator) for _ in range(50)]

    def step(*dtypes: torch.dtype) -> list[bytes]:
        params = [nn.Parameter(value.clone()) for value in values]
        others = [nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in dtypes]
        optimizer = lars([{"params": [*others, *params]}], lr=1.0, trust_coefficient=1.0)
        for p in (*others, *params):
            p.grad = p.detach().sin()
        optimizer.step()
        return [p.detach().numpy().tobytes() for p in params]

    assert step() == step(torch.float64) == step(torch.float64, torch.float32)
