"""Every way to draw a number is noticed, and samples are compared bit by bit."""

import random

import numpy as np
import pytest
import torch

from trainer.data.draws import same, untouched, watch

DRAWS = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "numpy": np.random.rand,
    "numpy normal": np.random.standard_normal,
    "torch": lambda: torch.rand(()),
    "torch normal": lambda: torch.randn(20),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
    "random seeded": lambda: random.seed(3),
    "numpy seeded": lambda: np.random.seed(3),
    "torch seeded": lambda: torch.manual_seed(3),
    "as many as a state has": lambda: [random.getrandbits(32) for _ in range(624)],
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_noticed(draw):
    watch()
    draw()
    assert not untouched()


def test_other_code_is_not_noticed():
    watch()
    torch.ones(3).sum()
    np.random.default_rng(0).random()
    random.Random(0).random()
    torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert untouched()


SAMPLES = [
    torch.tensor([1.0, float("nan")]), torch.tensor(3), np.arange(6).reshape(2, 3), np.float32(2), 1, 2.0, "a", b"a",
    None, (1, "a"), [torch.ones(2), {"x": np.zeros(2)}], {"x": torch.ones(2), "y": (1, 2)}, torch.ones(4, 6).t()[::2],
]  # fmt: skip


def test_equal_samples_are_the_same_and_all_others_differ():
    for i, one in enumerate(SAMPLES):
        for k, other in enumerate(SAMPLES):
            assert same(one, other) == (i == k), (one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (np.zeros(2), np.zeros(2, np.float32)),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ([1, 2], [1, 2, 3]),
        (object(), object()),
        (torch.ones(2).to_sparse(), torch.zeros(2).to_sparse()),
    ],
)
def test_what_differs_in_a_bit_or_is_unknown_is_not_the_same(one, other):
    assert not same(one, other)
