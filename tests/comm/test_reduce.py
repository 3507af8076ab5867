"""The chain: a mean that has the bits of DDP's own reducer, the thread beside the caller, and pieces of buckets."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer.comm.bucket import Bucket
from trainer.comm.ranks import Ranks
from trainer.comm.reduce import AllReduce, Background, Reduce, Reduced
from trainer.parallel import ddp
from trainer.process.environment import Place

CPU = torch.device("cpu")
BUCKET = Bucket([], 0)


def through(reduce: Reduce, module: nn.Module, place: Place, arguments: dict[str, Any]) -> nn.Module:
    """The module in DDP, with `reduce` for its reducer."""
    return ddp.DDP(module, place.rank, place.world, CPU, arguments, reduce, lambda: 0).model


def gradients_by(place: Place, ours: bool) -> list[np.ndarray]:
    """Of 3 backward passes, through DDP's reducer or through ours, over several buckets."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(33, 33) for _ in range(6)])
    reduce = AllReduce(ranks.new_group()) if ours else None
    model = DDP(module, bucket_cap_mb=0.01) if not reduce else through(reduce, module, place, {"bucket_cap_mb": 0.01})
    generator = torch.Generator().manual_seed(place.rank)
    result = []
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(5, 33, generator=generator)).square().sum().backward()
        result += [p.grad.numpy().copy() for p in module.parameters()]
    del model
    ranks.close()
    return result


def test_the_chain_has_the_bits_of_ddps_own_reducer():
    plain, ours = run_ranks(3, gradients_by, False), run_ranks(3, gradients_by, True)
    for a, b in zip(plain, ours, strict=True):
        assert [x.tobytes() for x in a] == [y.tobytes() for y in b]


def means_of_sparse(place: Place) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of tensors with rows that are used twice, of a rank without any, and of no rank with any; the dense mean, too."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    ends, result = AllReduce(ranks.new_group()), []
    for used in ([5, 1, 9], [2, 0, 1], [0, 0, 0]):
        count = used[place.rank]
        rows = torch.randint(0, 6, (1, count))
        own = torch.sparse_coo_tensor(rows, torch.randn(count, 4), (6, 4))
        dense = ends(own.to_dense(), BUCKET)
        mean = ends(own, BUCKET)
        assert mean.indices()[0].tolist() == dense.any(1).nonzero().flatten().tolist()  # rows that some rank used alone
        result.append((dense.numpy(), mean.to_dense().numpy()))
    ranks.close()
    return result


def test_sparse_tensors_have_the_mean_of_dense_ones_and_the_same_bits_on_each_rank():
    first, *others = run_ranks(3, means_of_sparse)
    for dense, sparse in first:
        np.testing.assert_allclose(sparse, dense, rtol=1e-5, atol=1e-7)
    for other in others:
        assert [sparse.tobytes() for _, sparse in other] == [sparse.tobytes() for _, sparse in first]


def exchanged(place: Place) -> tuple[np.ndarray, np.ndarray]:
    """Two rounds in a group that has not all ranks, each begun at another time."""
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    ends = AllReduce(ranks.new_groups([[0, 2], [1]]))
    for _ in range(2):
        time.sleep(0.05 * place.rank)
        rows = torch.arange(ends.size * 5).view(ends.size, 5) + 100 * place.rank
        swapped, gathered = ends.swap(rows), ends.gather(rows[0])
    ranks.close()
    return swapped.numpy(), gathered.numpy()


def test_rows_are_swapped_and_gathered():
    (of_0, all_0), (of_1, all_1), (of_2, all_2) = run_ranks(3, exchanged)
    row = np.arange(5)
    assert (of_0 == [row, row + 200]).all() and (of_2 == [row + 5, row + 205]).all()
    assert (all_0 == [row, row + 200]).all() and (all_2 == all_0).all()
    assert (of_1 == [row + 100]).all() and (all_1 == of_1).all()


def backward_with_a_lost_peer(place: Place) -> str:
    ranks = Ranks(place, "cpu", "gloo", 60.0)

    def reduce(flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        raise ConnectionResetError("peer is gone")

    model = through(reduce, nn.Linear(3, 3), place, {})
    try:
        model(torch.ones(1, 3)).sum().backward()
        message = ""
    except RuntimeError as error:
        message = str(error)
    del model
    ranks.close()
    return message


def test_what_a_reduce_raises_is_what_backward_raises():
    for message in run_ranks(2, backward_with_a_lost_peer):
        assert "ConnectionResetError: peer is gone" in message


def test_background_keeps_the_order_on_one_thread_beside_the_caller():
    background, seen = Background(CPU), []

    def call(number: int, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        seen.append((number, threading.current_thread()))
        return torch.tensor(number)

    futures = [background.submit(call, number, 0.02 / (number + 1)) for number in range(5)]
    assert not futures[-1].done()
    assert [int(future.wait()) for future in futures] == list(range(5))
    assert [number for number, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen}) == 1
    assert threading.current_thread() not in dict(seen).values()
    background.thread.shutdown()


def test_an_error_in_the_background_is_raised_by_wait_and_nothing_runs_after_it():
    """Peers wait for what has failed: what came next would go in its place."""
    background = Background(CPU)

    def fails() -> torch.Tensor:
        raise ConnectionResetError("peer is gone")

    later: list[int] = []
    for done in (background.submit(fails), background.submit(lambda: later.append(1) or torch.ones(1))):
        with pytest.raises(ConnectionResetError, match="peer is gone"):
            done.wait()
    assert not later
    background.thread.shutdown()


def gathered(place: Place) -> tuple[list, list]:
    ranks = Ranks(place, "cpu", "gloo", 60.0)
    end = AllReduce(ranks.new_group())
    rows = end.gather(torch.tensor([place.rank, 7], dtype=torch.uint8))
    swapped = end.swap(torch.arange(3)[:, None] + 10 * place.rank)
    ranks.close()
    return rows.tolist(), swapped.tolist()


def test_what_codecs_gather_and_swap():
    for rank, (rows, swapped) in enumerate(run_ranks(3, gathered)):
        assert rows == [[0, 7], [1, 7], [2, 7]]
        assert swapped == [[rank], [10 + rank], [20 + rank]]


def test_on_a_stream_a_result_has_arrived_when_the_stream_is_through_with_it():
    done = Reduced()
    assert not done.arrived()
    done.set_result(torch.ones(1))
    assert done.arrived()  # on a thread
    through: Any = SimpleNamespace(query=lambda: False)
    done.event = through
    assert done.done() and not done.arrived()  # enqueued only
    through.query = lambda: True
    assert done.arrived()
