"""LAMB against the paper's algorithm in NumPy."""

import numpy as np
import torch
from torch import nn

from trainer.optim.factories import lamb


def plain_lamb(weights: list[np.ndarray], gradients: list[list[np.ndarray]], decays: list[float], lr: float) -> None:
    """You et al. 2020, algorithm 2, line by line, with phi(x) = x; in place."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    for w, gs, decay in zip(weights, gradients, decays):
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, g in enumerate(gs, start=1):
            m[...] = beta1 * m + (1 - beta1) * g
            v[...] = beta2 * v + (1 - beta2) * g * g
            r = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
            update = r + decay * w
            lengths = np.sqrt((w * w).sum()), np.sqrt((update * update).sum())
            trust = lengths[0] / lengths[1] if lengths[0] > 0 and lengths[1] > 0 else 1.0
            w -= lr * trust * update


def test_lamb_is_the_papers():
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(5, 3)), np.zeros((4, 4)), rng.normal(size=7), np.zeros(3)]
    gradients = [[rng.normal(size=w.shape) * 10.0 ** rng.integers(-3, 2) for _ in range(50)] for w in weights]
    gradients[2][0][:] = 0.0  # a bias without decay, and without an update at its first step
    decays = [0.1, 0.1, 0.0, 0.0]
    ours = [nn.Parameter(torch.tensor(w)) for w in weights]
    optimizer = lamb([{"params": ours[:2], "weight_decay": 0.1}, {"params": ours[2:], "weight_decay": 0.0}], lr=0.01)
    for step in range(50):
        for p, gs in zip(ours, gradients):
            p.grad = torch.tensor(gs[step])
        optimizer.step()
    plain_lamb(weights, gradients, decays, 0.01)
    for p, w in zip(ours, weights):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-10, atol=1e-12)


def test_a_parameters_step_has_the_same_bits_whichever_others_step():
    """A rank of `shard` steps some. One of another dtype must not lend its precision to the others' norms."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(4, 4, generator=generator) for _ in range(50)]

    def step(*dtypes: torch.dtype) -> list[bytes]:
        params = [nn.Parameter(value.clone()) for value in values]
        others = [nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in dtypes]
        optimizer = lamb([{"params": [*others, *params]}], lr=0.1)
        for p in (*others, *params):
            p.grad = p.detach().sin()
        optimizer.step()
        return [p.detach().numpy().tobytes() for p in params]

    assert step() == step(torch.float64) == step(torch.float64, torch.float32)
