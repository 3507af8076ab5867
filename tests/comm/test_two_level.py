"""The mean over two levels is the mean; across nodes a rank sends its own part, which may be empty."""

import numpy as np
import pytest
import torch
from support.ranks import run_ranks

from trainer.comm.bucket import Bucket
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce
from trainer.comm.two_level import TwoLevel
from trainer.process.environment import Place


class Noted(AllReduce):
    def __call__(self, flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        self.sent = flat.numel(), [stop - start for _, start, stop in bucket.pieces]
        return super().__call__(flat, bucket)


def mean(place: Place, size: int) -> tuple[np.ndarray, np.ndarray, tuple[int, list[int]]]:
    """Two nodes of two ranks."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    inside = ranks.new_groups([[0, 1], [2, 3]])
    across = Noted(ranks.new_groups([[0, 2], [1, 3]]))
    across.sent = 0, []
    own = torch.randn(size, generator=torch.Generator().manual_seed(place.rank), dtype=torch.float64)
    bucket = Bucket.of([torch.empty(3), torch.empty(size - 3)] if size > 3 else [torch.empty(size)], 0)
    found = TwoLevel(inside, across)(own.clone(), bucket)
    ranks.close()
    return own.numpy(), found.numpy(), across.sent


@pytest.mark.parametrize(
    ("size", "sent"), [(8, [(4, [3, 1]), (4, [4])]), (7, [(4, [3, 1]), (3, [3])]), (1, [(1, [1]), (0, [])])]
)
def test_the_mean_is_the_mean_and_each_rank_sends_its_part(size, sent):
    results = run_ranks(4, mean, size)
    expected = np.mean([own for own, _, _ in results], 0)
    for rank, (_, found, across) in enumerate(results):
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-15)
        assert across == sent[rank % 2]
