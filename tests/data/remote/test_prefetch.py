"""Remote shards before their rows are needed: which, when, and how many, from a real nginx; the same samples."""

import contextlib
import fcntl
import itertools
import multiprocessing
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shard_recipe import Tars, write_points
from support.http import Proxy, needs_nginx, served
from support.loaders import open_loader
from support.loaders import whole as whole_step
from toy_recipe import Points

from trainer import timeouts
from trainer.config.options import DataOptions
from trainer.data.batch import Split
from trainer.data.loader import Loader
from trainer.data.remote.eviction import FOLDER, make_folder
from trainer.data.remote.prefetch import DOWNLOADS, FAR, Window, fetching, training_needs
from trainer.data.remote.shard import Remote
from trainer.data.sampling.mixture import Mixture
from trainer.data.sampling.order import Order, Refs
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.errors import UnavailableError

SHARDS, EACH, LANES, BATCH, BLOCK = 24, 8, 4, 8, 4  # a shard lasts for four batches, a block for two
SIZE = 30720  # bytes of a shard


def orders(seed: int) -> tuple[Order | Mixture, Order | Mixture]:
    """Random ones, of one data set and of two."""
    rng = random.Random(seed)
    counts = [[rng.randint(1, 30) for _ in range(rng.randint(2, 12))] for _ in range(2)]
    lanes, block = rng.randint(1, 12), rng.randint(1, 20)
    return Order(counts[0], seed, lanes, block), Mixture(counts, [1.0, 2.0], seed, lanes, block)


@pytest.mark.parametrize("seed", range(6))
def test_the_shards_of_a_batch_are_those_of_its_blocks(seed: int) -> None:
    for order in orders(seed):
        for start, world in ((0, 1), (17, 2), (order.samples - 9, 3)):
            for rank in range(world):
                found = order.shards(start, start + 23, rank, world)
                assert {ref.shard for ref in order.local(start, start + 23, rank, world)} <= found
                if isinstance(order, Order):
                    blocks = {
                        (e, v, r // order.block) for e, v, r in zip(*order._local(start, start + 23, rank, world))
                    }
                    assert found == {ref.shard for block in blocks for ref in whole(order, *block)}


def whole(order: Order, epoch: int, lane: int, number: int) -> Refs:
    """All of a block."""
    rows = order.bounds[lane + 1] - order.bounds[lane]
    first = number * order.block
    block = np.arange(first, min(first + order.block, rows))
    return order.refs(np.full_like(block, epoch), np.full_like(block, lane), block)


def test_the_window_by_hand() -> None:
    needs = [{0, 1}, {0, 1}, {2, 1}, {2, 3}, {9, 3}, {4}]
    sizes = dict.fromkeys(range(5), 10)  # 9 is a local file
    window = Window(iter(needs), sizes, most=4, room=30)
    assert list(window.move(0)) == [0, 1, 2] and list(window.move(1)) == []  # a fourth would not fit
    assert list(window.move(2)) == [3] and list(window.last) == [1, 2, 3]
    assert list(window.move(3)) == [4] and list(window.move(4)) == []
    assert list(window.last) == [3, 4] and list(window.move(6)) == [] and not window.last
    assert list(Window(iter(needs), sizes, most=1, room=99).move(0)) == [0, 1]  # those of the first, but no more
    assert list(Window(iter(needs), sizes, most=9, room=19).move(0)) == []
    small = Window(iter(needs), {**sizes, 0: 99}, most=9, room=30)  # the first two do not fit
    assert [list(small.move(done)) for done in range(3)] == [[], [], [1, 2, 3]]


@pytest.mark.parametrize("seed", range(6))
def test_a_window_holds_what_comes_next_and_no_more_than_fits(seed: int) -> None:
    rng = random.Random(seed)
    order = orders(seed)[seed % 2]
    needs = list(training_needs(order, [(n * 7, Split(7, 3, 2)) for n in range(60)], 1))
    assert len(needs) == 60 and needs[0] == order.shards(0, 7, 1, 3)
    sizes = {shard: rng.randint(1, 9) for shard in range(40)}
    room, most = rng.randint(10, 60), rng.randint(2, 12)
    window = Window(iter(needs), sizes, most, room)
    came: list[int] = []
    for done in range(60):
        came += window.move(done)
        assert sum(sizes[shard] for shard in window.last) <= room
        held = list(itertools.takewhile(lambda each: each <= window.last.keys(), needs[done:]))
        if len(window.last) < most and done + len(held) < 60:  # full is the reason
            following = set().union(*needs[done : done + len(held) + 1]) | window.last.keys()
            assert sum(sizes[shard] for shard in following) > room
    assert set(came) <= set().union(*needs)


def test_a_walk_through_few_shards_ends() -> None:
    """All are in the window, for ever."""
    window = Window(itertools.repeat({0, 1}), {0: 1, 1: 1}, most=9, room=9)
    assert list(window.move(0)) == [0, 1] and window.next and window.next[0] == FAR


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("web")
    with served(folder) as proxy:
        assert {path.stat().st_size for path in write_points(folder / "www", SHARDS * EACH, EACH)} == {SIZE}
        Index.open(find_shards(all_of(proxy), DataOptions(cache_dir=str(folder / "indexed"))))
        yield proxy


@pytest.fixture
def proxy(web: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """All is indexed, and nothing kept."""
    asked = -1
    while web.open or asked != len(web.requests):  # by a process that was killed as the test before ended
        asked = len(web.requests)
        time.sleep(0.05)
    web.well()
    monkeypatch.setattr(timeouts, "LOOK_S", 0.02)
    monkeypatch.setattr(timeouts, "AGAIN_S", 0.05)
    make_folder(tmp_path / "cache" / FOLDER)
    for path in (web.nginx.folder / "indexed" / FOLDER).glob("*.idx"):
        shutil.copy(path, tmp_path / "cache" / FOLDER)
    return web


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this process has downloaded itself, because a batch needed it."""
    found: list[str] = []
    download = Remote._download

    def noted(self: Remote) -> Any:
        if file := download(self):
            found.append(self.name)
        return file

    monkeypatch.setattr(Remote, "_download", noted)
    return found


def all_of(proxy: Proxy) -> str:
    return f"{proxy.url}/p-{{000000..{SHARDS - 1:06d}}}.tar"


class Validated(Tars):
    def data(self, split: str) -> Any:
        return self.shards if split == "val" else Points(24, torch.float32)


def loader(recipe: Tars, tmp_path: Path, shards: float = 99, lanes: int = LANES, **more: Any) -> Loader:
    """Reads nothing before it must. `shards`: for so many the folder has room."""
    data = DataOptions(
        0, shuffle_shards=lanes, shuffle_window=BLOCK, cache_dir=str(tmp_path / "cache"), cache_gb=shards * SIZE / 1e9
    )
    return open_loader(recipe, options=data, batch=BATCH, accumulate=2, seed=5, **more)


def shards_of(loader: Loader, steps: int) -> list[list[str]]:
    """Of each batch, those of its blocks."""
    order, names = loader.order, [shard.path.name for shard in loader.source.reader.index.shards]
    return [sorted(names[i] for i in order.shards(n * BATCH, (n + 1) * BATCH, 0, 1)) for n in range(steps)]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def forked() -> list[Any]:
    """Not the ranks of other tests, which wait for the next."""
    return [child for child in multiprocessing.active_children() if "ForkServer" not in type(child).__name__]


def held(cache: Path) -> int:
    """Bytes in the folder, those that are coming among them."""
    found = 0
    with (cache / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in cache.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size if path.suffix not in (".idx", ".TAG") else 0
    return found


def names(proxy: Proxy) -> Counter[str]:
    return Counter(path.removeprefix("/") for path in proxy.paths())


@needs_nginx
def test_what_is_needed_next_is_asked_for_before_and_the_samples_are_the_same(
    proxy: Proxy, tmp_path: Path, own: list[str]
) -> None:
    steps, most = 30, 2 * LANES + DOWNLOADS
    far = loader(Tars(all_of(proxy)), tmp_path)
    needs = shards_of(far, steps)
    stream, found, due = far.train(0, stop=steps * BATCH), [], set[str]()
    for step in range(steps):
        found.append(whole_step(next(stream)))
        if step == 0:
            first = list(own)
        coming = list[str]()
        for each in needs[step + 1 :]:  # until there are enough
            coming += [name for name in each if name not in coming] if len(coming) < most else []
        due |= set(needs[step]) | set(coming)
        until(lambda: due <= set(names(proxy)))  # noqa: B023 called at once
        assert due == set(names(proxy))
    stream.close()
    assert first == own and set(first) <= set(needs[0])
    assert len(due) == SHARDS and set(names(proxy).values()) == {1}
    near = loader(Tars(str(proxy.nginx.folder / "www" / "p-*.tar")), tmp_path)
    for step, other in zip(found, map(whole_step, near.train(0))):
        assert step.refs == other.refs and not step.bad
        assert all(torch.equal(a["x"], b["x"]) for a, b in zip(step.batches, other.batches))


@needs_nginx
def test_nothing_is_fetched_for_steps_that_the_run_does_not_make(proxy: Proxy, tmp_path: Path) -> None:
    far = loader(Tars(all_of(proxy)), tmp_path)
    due = {name for each in shards_of(far, 2) for name in each}
    stream = far.train(0, stop=2 * BATCH)
    next(stream)
    until(lambda: due <= set(names(proxy)))
    time.sleep(0.1)
    stream.close()
    assert due == set(names(proxy)) and len(due) < 2 * LANES + DOWNLOADS


@needs_nginx
def test_the_first_batch_waits_for_several_downloads_at_a_time(proxy: Proxy, tmp_path: Path, own: list[str]) -> None:
    proxy.bytes_per_s = 200_000
    far = loader(Tars(all_of(proxy)), tmp_path, lanes=BATCH)
    stream = far.train(0)
    next(stream)
    stream.close()
    assert len(shards_of(far, 1)[0]) >= BATCH and len(own) <= BATCH / 2
    assert DOWNLOADS <= proxy.most_open <= DOWNLOADS + 1


@needs_nginx
def test_with_little_room_next_to_nothing_is_fetched_twice_and_the_folder_stays_in_its_bound(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str]
) -> None:
    """For ten, where a batch needs up to eight, and twelve are looked for."""
    monkeypatch.setattr(timeouts, "IDLE_S", 0.0)
    monkeypatch.setattr(timeouts, "SPARE_S", 0.25)
    far, steps, cache, most = loader(Tars(all_of(proxy)), tmp_path, 10.5), 12, tmp_path / "cache" / FOLDER, 0
    remote = far.source.reader.remote()
    needs = training_needs(far.order, [(n * BATCH, far.split) for n in range(steps)], 0)
    window = Window(needs, dict.fromkeys(remote, SIZE), 2 * LANES + DOWNLOADS, int(10.5 * SIZE))
    stream = far.train(0)
    for step in range(steps):
        next(stream)
        list(window.move(step + 1))
        while not all(remote[number].file.exists() for number in window.last):
            most = max(most, held(cache))
            time.sleep(0.005)
        most = max(most, held(cache))
    stream.close()
    assert set(own) <= set(shards_of(far, 1)[0]) and sum(names(proxy).values()) <= len(names(proxy)) + 2
    assert len(names(proxy)) >= 11 and 9 * SIZE < most <= 10.5 * SIZE


@needs_nginx
def test_without_room_for_what_a_batch_needs_nothing_is_fetched_ahead(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str]
) -> None:
    monkeypatch.setattr(timeouts, "IDLE_S", 0.0)
    far = loader(Tars(all_of(proxy)), tmp_path, 2.5)
    stream = far.train(0)
    for _ in range(4):
        next(stream)
        time.sleep(0.05)
    stream.close()
    assert len(own) == len(proxy.requests) > SHARDS / 2


@needs_nginx
def test_it_ends_at_once_and_what_it_leaves_is_removed(proxy: Proxy, tmp_path: Path) -> None:
    far, cache = loader(Tars(all_of(proxy)), tmp_path), tmp_path / "cache" / FOLDER
    stream = far.train(0)
    next(stream)
    until(lambda: len(proxy.requests) >= 2 * LANES + DOWNLOADS and not proxy.open)
    proxy.bytes_per_s = 500  # a minute a shard
    while not list(cache.glob(".part-*")):
        next(stream)
        time.sleep(0.05)
    started = time.monotonic()
    stream.close()
    assert time.monotonic() - started < 20 and not forked()
    assert list(cache.glob(".part-*"))
    proxy.well()
    far.source.reader.index.shards[0].path.drop()
    far.source.reader.index.shards[0].path.open().close()
    assert not list(cache.glob(".part-*"))


@needs_nginx
def test_what_can_not_be_had_ends_the_batch_that_needs_it_and_none_before(proxy: Proxy, tmp_path: Path) -> None:
    far = loader(Tars(all_of(proxy)), tmp_path)
    order, shards = far.order, far.source.reader.index.shards
    needs = [{ref.shard for ref in order.local(n * BATCH, (n + 1) * BATCH, 0, 1)} for n in range(12)]
    at, number = next((n, i) for n in range(4, 12) for i in needs[n] if not any(i in each for each in needs[:n]))
    www = proxy.nginx.folder / "www"
    (www / shards[number].path.name).rename(www / "aside")
    try:
        stream = far.train(0)
        for _ in range(at):
            next(stream)
        with pytest.raises(UnavailableError, match=rf"{shards[number].path.name}: HTTP Error 404"):
            next(stream)
    finally:
        (www / "aside").rename(www / shards[number].path.name)


@needs_nginx
def test_validation_has_the_next_ones_too(proxy: Proxy, tmp_path: Path, own: list[str]) -> None:
    far = loader(Validated(all_of(proxy)), tmp_path)
    stream = far.validate()
    micro = far.split.micro
    for n, _ in enumerate(stream):
        due = min(SHARDS, n * micro // EACH + 2 + DOWNLOADS)
        until(lambda: len(proxy.requests) >= due)  # noqa: B023 called at once
    assert (
        n == SHARDS * EACH / micro - 1
        and sorted(names(proxy)) == [f"p-{i:06d}.tar" for i in range(SHARDS)]
        and set(names(proxy).values()) == {1}
    )
    assert own in ([], ["p-000000.tar"])


@needs_nginx
def test_it_heeds_a_signal_that_the_rank_does_not(proxy: Proxy, tmp_path: Path, own: list[str]) -> None:
    """Else the interpreter would wait for it at its end, wherever the loader was not closed."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        far = loader(Tars(all_of(proxy)), tmp_path)
        stream = far.train(0)
        next(stream)
        [process] = forked()
        until(lambda: len(proxy.paths()) > len(own))
        process.terminate()
        until(lambda: not forked())
        for _ in range(12):
            next(stream)  # whatever has become of it
    finally:
        signal.signal(signal.SIGTERM, before)
    stream.close()


def test_for_files_there_is_no_process() -> None:
    with fetching({}, lambda: iter([{0}]), 4, 1) as passed:
        passed()
        assert not forked()
