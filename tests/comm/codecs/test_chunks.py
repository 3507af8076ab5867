"""Parts that a cache holds cover everything once; a GPU has one."""

import pytest
import torch

from trainer.comm.codecs.chunks import CHUNK, chunks


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("unit", [1, 7, 2 * CHUNK])
def test_each_item_is_in_one_part(count, unit):
    parts = list(chunks(count, torch.device("cpu"), unit))
    assert [i for part in parts for i in (part.start, part.stop)][1:-1] == [
        bound for part in parts[1:] for bound in (part.start, part.start)
    ]
    assert (parts[0].start, parts[-1].stop) == (0, count) if count else not parts
    assert all(part.stop - part.start == 1 or (part.stop - part.start) * unit <= CHUNK for part in parts)
    assert list(chunks(count, torch.device("cuda"), unit)) == ([slice(0, count)] if count else [])
