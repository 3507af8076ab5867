"""Several data sets as one stream: the specification written a second time, plainly, and a run that is resumed."""

import hashlib
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.messages import refuses
from support.quick import quick
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.opening import open_source
from trainer.data.sampling.mixture import DRAWS, Mixture
from trainer.data.sampling.order import Order, Ref, permutation
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples
from trainer.errors import DataError
from trainer.process.environment import Place
from trainer.rng import mix
from trainer.trainer import Trainer

COUNTS, WEIGHTS = [[37, 1, 100], [64, 23], [5]], [6.0, 3.0, 1.0]
FIRST = [0, 3, 5]  # shard of each data set


def mixture(seed: int = 2024) -> Mixture:
    return Mixture(COUNTS, WEIGHTS, seed, lanes=10, block=16)


def plain_stream(seed: int, blocks: int) -> list[Ref]:
    """One position after the other, with a counter for each data set."""
    orders = [Order(COUNTS[i], mix(seed, 6, i), lanes, 16) for i, lanes in enumerate((6, 3, 1))]
    used, stream = [0, 0, 0], list[Ref]()
    for number in range(blocks):
        ends = [[int(share * n * DRAWS) for share in (0.6, 0.6 + 0.3)] + [n * DRAWS] for n in (number, number + 1)]
        upto, after = ([end - begin for begin, end in zip([0, *row], row)] for row in ends)
        drawn = [i for i in range(3) for _ in range(after[i] - upto[i])]
        for place in permutation(DRAWS, seed, 7, number):
            source = drawn[place]
            (ref,) = orders[source].local(used[source], used[source] + 1, 0, 1)
            stream.append(ref._replace(shard=ref.shard + FIRST[source]))
            used[source] += 1
    return stream


@pytest.fixture(scope="module")
def stream() -> list[Ref]:
    return plain_stream(2024, 2)


def test_the_stream_is_the_specification(stream):
    made = mixture()
    assert made.samples == 230
    for position in (*range(300), *range(DRAWS - 5, DRAWS + 300), 2 * DRAWS - 1):
        assert made.local(position, position + 1, 0, 1) == [stream[position]]


def test_the_stream_is_frozen(stream):
    assert (
        hashlib.sha256(repr([tuple(ref) for ref in stream[:1000]]).encode()).hexdigest()
        == "1e6597380d3d944f760ac36188764b4f963c0df647b07c570099e3489da2ef8e"
    )


def test_the_order_within_a_batch_is_frozen():
    made, digest = mixture(), hashlib.sha256()
    for world, start, batch in itertools.product((1, 3, 8), (0, DRAWS - 7, 10**9), (1, 12, 500)):
        pieces = [made.local(start, start + batch, rank, world) for rank in range(world)]
        digest.update(repr([[tuple(ref) for ref in piece] for piece in pieces]).encode())
        digest.update(repr([sorted(made.shards(start, start + batch, rank, world)) for rank in range(world)]).encode())
    assert digest.hexdigest() == "488e0f7c31bb25f343c2d44abe2c281cd90b373f696ce1827d3eb489b653eb16"


def test_each_data_set_has_its_share_and_all_its_samples_in_every_epoch(stream):
    shares = Counter(next(i for i in (2, 1, 0) if ref.shard >= FIRST[i]) for ref in stream)
    assert [round(shares[i] / len(stream), 3) for i in range(3)] == [0.6, 0.3, 0.1]
    for source, counts in enumerate(COUNTS):
        of_it = [ref for ref in stream if 0 <= ref.shard - FIRST[source] < len(counts)]
        size = sum(counts)
        for epoch in range(len(of_it) // size):
            part = of_it[epoch * size : (epoch + 1) * size]
            every = {Ref(epoch, FIRST[source] + s, i) for s, count in enumerate(counts) for i in range(count)}
            assert set(part) == every


def test_the_pieces_of_all_ranks_are_the_batch(stream):
    made = mixture()
    for world in range(1, 17):
        for start in (0, 5, DRAWS - 7, DRAWS, 2 * DRAWS - 48):
            for batch in (1, 12, 31, 48):
                pieces = [made.local(start, start + batch, rank, world) for rank in range(world)]
                assert sorted(ref for piece in pieces for ref in piece) == sorted(stream[start : start + batch])
                sizes = {len(piece) for piece in pieces}
                assert max(sizes) - min(sizes) <= (0 if batch % world == 0 else 1)


def test_each_rank_has_its_part_of_each_data_set():
    """Not one rank the one and another rank the other: where ranks learn apart, they learn the same."""
    made, seen = mixture(), [Counter[int]() for _ in range(3)]
    for start in range(0, 4800, 48):
        for rank, counter in enumerate(seen):
            counter.update(ref.shard >= FIRST[1] for ref in made.local(start, start + 48, rank, 3))
    for counter in seen:
        assert 0.37 < counter[True] / counter.total() < 0.43


@pytest.mark.parametrize("seed", quick(range(5), 2))
def test_restarts_at_other_world_sizes_lose_and_repeat_nothing(seed):
    rng, step, seen, batch = random.Random(seed), 0, list[Ref](), 48
    while step < 200:
        made, world = mixture(seed), rng.randint(1, 16)
        for _ in range(rng.randint(1, 20)):
            seen += [ref for rank in range(world) for ref in made.local(step * batch, (step + 1) * batch, rank, world)]
            step += 1
    whole = mixture(seed)
    assert sorted(seen) == sorted(whole.local(0, step * batch, 0, 1))
    assert max(Counter(seen).values()) == 1


def test_a_far_position_takes_no_longer():
    assert len(mixture().local(10**12 + 7, 10**12 + 103, 1, 2)) == 48


@pytest.mark.parametrize("weights", [[0.0, 1.0, 1.0], [-1.0, 1.0, 1.0], [1e-4, 1.0, 1.0], [float("nan"), 1.0, 1.0]])
def test_a_weight_that_says_nothing_is_refused(weights):
    with refuses("recipe.data('train')", "0.001", kind=DataError):
        Mixture(COUNTS, weights, 0, 8, 8)


class Of(Toy):
    """Shards of numbers: `a` has 0 to 29, `b` 100 to 109."""

    def __init__(self, given: Any) -> None:
        super().__init__(width=8)
        self.given = given

    def data(self, split: str) -> Any:
        return self.given

    def transform(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
        x = np.full(8, sample["cls"] / 100, np.float32) + rng.random(8, np.float32) / 10
        return {"x": x, "y": np.sin(x[:4]), "mask": np.ones(4, np.float32)}


@pytest.fixture
def shards(tmp_path) -> dict[str, float]:
    for name, numbers in (("a", range(30)), ("b", range(100, 110))):
        write_shards(({"__key__": f"{i:03d}", "cls": i} for i in numbers), tmp_path / "data", name, per_shard=7)
    return {str(tmp_path / "data" / "a-*.tar"): 1.0, str(tmp_path / "data" / "b-*.tar"): 1}


def test_shards_with_weights(shards):
    source = open_source(Of(shards), "train", 0)
    assert isinstance(source, Samples)
    assert source.counts == [7, 7, 7, 7, 2, 7, 3]
    refs = source.order(8, 4).local(0, 400, 0, 1)
    assert sum(ref.shard >= 5 for ref in refs) == pytest.approx(200, abs=40)
    assert {source.reader.read(ref)["cls"] for ref in refs} == {*range(30), *range(100, 110)}
    patterns = list(shards)
    others = [dict.fromkeys(patterns[:1], 2.0) | {patterns[1]: 1.0}, patterns]
    prints = [source.fingerprint, *(open_source(Of(each), "train", 0).fingerprint for each in others)]
    assert len(set(prints)) == 3, "a resume with other weights would not be refused"


@pytest.mark.parametrize("given", [{"a.tar": "much"}, {"a.tar": True}, {3: 1.0}])
def test_what_is_no_mixture_is_told(given):
    with refuses("recipe.data('train')", "mixture", kind=DataError):
        open_source(Of(given), "train", 0)


class Audit(Callback):
    def __init__(self) -> None:
        self.refs: list[list[Ref]] = []

    def on_step_end(self, trainer) -> None:
        self.refs.append(trainer.data.refs)


def audited(place: Place, given: dict[str, float], resume: str | None) -> tuple[list[list[Ref]], dict[str, float]]:
    audit = Audit()
    trainer = Trainer(
        Of(given), {"audit": audit}, batch=12,
        options=Options(max_steps=8, resume=resume, run_dir=f"runs/{place.world}-{bool(resume)}",
                        checkpoint=CheckpointOptions(every_steps=3, keep=9)),
        data=DataOptions(workers=0, shuffle_shards=8, shuffle_window=4), place=place,
    )  # fmt: skip
    trainer.fit()
    return audit.refs, trainer.validation


def test_a_resume_on_other_ranks_goes_on_with_the_same_samples(shards, tmp_path):
    whole = run_ranks(3, audited, shards, None)
    resumed = run_ranks(2, audited, shards, str(Path("ckpt/3-False/step-00000003")))
    for step in range(3, 8):
        assert sorted(ref for refs, _ in whole for ref in refs[step]) == sorted(
            ref for refs, _ in resumed for ref in refs[step - 3]
        )
    assert whole[0][1]["val/loss"] > 0  # each sample once: as many as there are in all, by weights of their own
