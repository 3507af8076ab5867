"""Parts of a step's batches: in order, with the weights of their items, and the losses of the batches again."""

import pytest
import torch

from trainer.data.batch import Micro, Step
from trainer.data.parts import Parts


def test_the_loss_of_a_batch_is_the_mean_over_the_items_of_its_parts():
    items = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.0])  # of each sample; the second batch has none
    step = Step([Micro(items, 6, [], []), Micro(torch.zeros(3), 0, [], []), Micro(items[:2], 1, [], [])])
    parts = Parts(step, 2, lambda part: int(part.sum()), "callbacks.mine")
    assert parts.weights == [6, 0, 1] and not parts.reduces
    seen = [(part.tolist(), weight) for part, weight in parts]
    assert seen == [([1.0], 1), ([0.0, 2.0], 2), ([3.0, 0.0], 3), ([0.0] * 3, 0), ([1.0, 0.0], 1)]
    losses = [torch.tensor(value) for value in (6.0, 9.0, 4.0, float("nan"), 5.0)]
    first, second, third = parts.merge(losses)
    assert first.item() == pytest.approx((6 + 2 * 9 + 3 * 4) / 6) and second.isnan() and third.item() == 5.0
