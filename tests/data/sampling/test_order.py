"""The order of samples: frozen numbers, and the specification written a second time, plainly, to compare with."""

import hashlib
import pickle
import random
from itertools import chain, islice, zip_longest

import numpy as np
import pytest

from trainer.config.options import DataOptions
from trainer.data.sampling.order import Order, Ref, permutation, walk
from trainer.errors import ConfigError
from trainer.rng import mix, mix_each

COUNTS = [37, 1, 100, 64, 23, 81, 5, 50]  # 361 samples


def at(order: Order, position: int) -> Ref:
    return order.local(position, position + 1, 0, 1)[0]


def plain_permutation(size: int, *keys: int) -> list[int]:
    items = list(range(size))
    for i in range(size - 1, 0, -1):
        j = mix(*keys, i) % (i + 1)
        items[i], items[j] = items[j], items[i]
    return items


def plain_epoch(counts: list[int], seed: int, lanes: int, block: int, epoch: int) -> list[Ref]:
    """A whole epoch as lists of lists."""
    line = [Ref(epoch, s, i) for s in plain_permutation(len(counts), seed, 1, epoch) for i in range(counts[s])]
    lanes = min(lanes, len(line))
    columns = []
    for v in range(lanes):
        lane = line[v * len(line) // lanes : (v + 1) * len(line) // lanes]
        blocks = [lane[i : i + block] for i in range(0, len(lane), block)]
        columns.append([b[i] for k, b in enumerate(blocks) for i in plain_permutation(len(b), seed, 2, epoch, v, k)])
    return [ref for row in zip_longest(*columns) for ref in row if ref is not None]


def random_setting(seed: int) -> tuple[list[int], int, int, int]:
    rng = random.Random(seed)
    counts = [rng.randint(0, 40) for _ in range(rng.randint(1, 30))] + [1]
    return counts, rng.getrandbits(63), rng.choice([1, 2, 3, 8, 12, 24, 64, 5000]), rng.choice([1, 4, 16, 64])


def test_mix_is_frozen() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published splitmix64 for seed 0
    assert mix(1) == 0xE4BACEA5C4B9B499
    assert mix(0, 0) == 0x48218226FF3CD4BF
    assert mix(7, 2, 0, 3, 1) == 0x6EB229EB0C3D2315
    assert mix(-1, 2**64 + 5) == 0xA1BB90488B505FE4
    assert mix(2**63, 1, 2, 3) == 0xF5A6E008CEAE72B9


def test_mix_each_is_mix() -> None:
    last = np.array([0, 1, 2, 2**32, 2**63, 2**64 - 1], dtype=np.uint64)
    for keys in ((), (0,), (-3, 2**70, 9)):
        assert mix_each(*keys, last=last).tolist() == [mix(*keys, x) for x in last.tolist()]


def test_permutation_is_fisher_yates() -> None:
    for size in (0, 1, 2, 3, 17, 1024):
        assert permutation(size, 5, 6) == plain_permutation(size, 5, 6)


def test_first_refs_are_frozen() -> None:
    order = Order(COUNTS, seed=2024, lanes=12, block=16)
    refs = [tuple(at(order, position)) for position in range(1000)]
    assert refs[:6] == [(0, 4, 2), (0, 7, 6), (0, 7, 45), (0, 2, 15), (0, 2, 55), (0, 2, 84)]
    digest = hashlib.sha256(repr(refs).encode()).hexdigest()
    assert digest == "b589d7b07673fa8032c4a1d4505c544451c9e6cb680bbb6c7e2bb6dbc37cd443"


def test_a_window_may_be_longer_than_a_lane() -> None:
    """Without tables of that length."""
    order = Order([9, 4], 3, 4, 10**12)
    assert [tuple(at(order, i)) for i in range(13)] == [tuple(ref) for ref in plain_epoch([9, 4], 3, 4, 10**12, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_stream_is_the_specification(seed: int) -> None:
    counts, run_seed, lanes, block = random_setting(seed)
    order = Order(counts, run_seed, lanes, block)
    expected = [ref for epoch in range(3) for ref in plain_epoch(counts, run_seed, lanes, block, epoch)]
    assert order.samples == sum(counts)
    assert [at(order, position) for position in range(len(expected))] == expected
    for epoch in range(3):
        one = expected[epoch * order.samples : (epoch + 1) * order.samples]
        assert sorted(one) == [Ref(epoch, s, i) for s, count in enumerate(counts) for i in range(count)]


@pytest.mark.parametrize("counts", [[3], [2, 0, 1], [1]])
def test_more_lanes_than_samples(counts: list[int]) -> None:
    order = Order(counts, seed=1, lanes=64, block=512)
    assert order.lanes == sum(counts)
    assert len({at(order, position) for position in range(5 * sum(counts))}) == 5 * sum(counts)


def test_the_pieces_of_all_ranks_are_the_batch() -> None:
    order = Order(COUNTS, seed=3, lanes=12, block=16)
    for world in range(1, 17):
        for start in (0, 5, 340, 355, 361, 719):  # also across the tail row and the end of an epoch
            for batch in (1, 12, 31, 48):
                pieces = [order.local(start, start + batch, rank, world) for rank in range(world)]
                planned = [at(order, position) for position in range(start, start + batch)]
                assert sorted(ref for piece in pieces for ref in piece) == sorted(planned)
                sizes = {len(piece) for piece in pieces}
                assert max(sizes) - min(sizes) <= (0 if batch % world == 0 else 1)


@pytest.mark.parametrize("seed", range(10))
def test_restarts_at_other_world_sizes_lose_and_repeat_nothing(seed: int) -> None:
    setting = random_setting(seed)
    rng = random.Random(seed)
    batch, total = rng.choice([1, 6, 12, 24, 48]), 2 * sum(setting[0])
    step, seen = 0, []
    while step * batch < total:
        order, world = Order(*setting), rng.randint(1, 16)  # a new process knows nothing but the step
        if rng.random() < 0.5:
            order = pickle.loads(pickle.dumps(order))
        for _ in range(rng.randint(1, 7)):
            seen += [ref for rank in range(world) for ref in order.local(step * batch, (step + 1) * batch, rank, world)]
            step += 1
    order = Order(*setting)
    assert len(seen) == len(set(seen)) == step * batch
    assert set(seen) == {at(order, position) for position in range(step * batch)}


@pytest.mark.parametrize("batch", [96, 48, 60, 100])
def test_a_shard_stays_on_two_ranks_per_epoch(batch: int) -> None:
    """Also where the batch is no multiple of the lanes. Apart from the steps around the end of an epoch."""
    world, epochs = 8, 2
    order = Order([100] * 64, seed=7, lanes=48, block=32)
    ranks: dict[tuple[int, int], set[int]] = {}
    for start in range(0, epochs * order.samples, batch):
        if start // order.samples != (start + 2 * batch) // order.samples:
            continue
        for rank in range(world):
            for ref in order.local(start, start + batch, rank, world):
                ranks.setdefault((ref.epoch, ref.shard), set()).add(rank)
    assert len(ranks) == epochs * 64
    assert max(map(len, ranks.values())) <= (2 if batch % 48 == 0 else 3)


def test_a_batch_mixes_as_many_shards_as_lanes() -> None:
    order = Order([100] * 64, seed=7, lanes=64, block=32)
    assert len({ref.shard for ref in order.local(0, 64, 0, 1)}) == 64


def test_large_data_is_looked_up_not_listed() -> None:
    """1e8 samples in 1e5 shards: this takes well under a second, and hours if anything were done per sample."""
    order = Order([1000] * 100_000, seed=7, lanes=256, block=1024)
    for start in (0, 5000 * 4096, 10**8 - 2048, 10**12):
        refs = order.local(start, start + 4096, 3, 8)
        assert len(set(refs)) == 512
        assert all(ref.epoch in (start // 10**8, start // 10**8 + 1) and 0 <= ref.offset < 1000 for ref in refs)


def test_seeds_and_epochs_differ() -> None:
    first = Order(COUNTS, seed=1, lanes=12, block=16).local(0, 361, 0, 1)
    other = Order(COUNTS, seed=2, lanes=12, block=16).local(0, 361, 0, 1)
    later = Order(COUNTS, seed=1, lanes=12, block=16).local(361, 722, 0, 1)
    assert first != other
    assert [ref[1:] for ref in first] != [ref[1:] for ref in later]


@pytest.mark.parametrize("world", range(1, 17))
def test_walk_is_the_stored_order_cut(world: int) -> None:
    counts = [3, 0, 5, 1]
    stored = [Ref(0, s, i) for s, count in enumerate(counts) for i in range(count)]
    pieces = [list(chain(*walk(counts, rank, world, 2))) for rank in range(world)]
    assert list(chain(*pieces)) == stored
    assert {len(piece) for piece in pieces} <= {9 // world, 9 // world + 1}


def test_a_walk_lists_nothing() -> None:
    counts = [10**12, 0, 10**12]
    walked = chain.from_iterable(walk(counts, 3, 4, 100))
    assert list(islice(walked, 2)) == [
        Ref(0, 2, 10**12 // 2),
        Ref(0, 2, 10**12 // 2 + 1),
    ]


@pytest.mark.parametrize("key", ["shuffle_shards", "shuffle_window"])
def test_settings_that_cannot_work_are_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"data.{key}=0: must be at least 1"):
        DataOptions(**{key: 0})
