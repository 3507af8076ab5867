"""Measures how fast samples come out of tar shards, beside WebDataset, torchdata and MosaicML's streaming.

    python -m scripts.bench.data [--quick] [--rounds 5] [--loaders NAME,...] [--json FILE]

A turn is one epoch of the same samples, in a process of its own. Every loader has a turn in each round. Samples count
from the second batch on, so a loader's start is not measured. A loader that is not installed has no row.

Large samples are 128 KiB of random bytes, like images that a loader does not decode. Small ones are 1024 tokens of 2
bytes, as npy. "Cold" means that the kernel was asked to drop the files from its page cache before the turn. The shards,
about 1 GB, are written to a temporary folder in the current folder, so they measure its disk. The last goal is the time
of a resume in ten million samples. The bench takes about 10 minutes.
"""

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.report import Goal, Row, at_least, median_ratio, parser, print_machine, report
from scripts.command import command
from trainer.config.options import DataOptions
from trainer.data.batch import Split
from trainer.data.loader import Loader
from trainer.data.shards.index import Index
from trainer.data.shards.index_file import store
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples, open_source
from trainer.errors import ConfigError, nearest

LARGE, TOKENS, SHARDS = 128 << 10, 1024, 16
MILLIONS = 10_000_000


@dataclass(frozen=True)
class Data:
    """Samples of one kind, as tar shards and, if MosaicML's streaming is installed, as MDS."""

    kind: str
    folder: Path
    samples: int
    batch: int

    @property
    def shards(self) -> list[str]:
        return sorted(map(str, (self.folder / "tar").glob("*.tar")))

    @property
    def member(self) -> str:
        return "bin" if self.kind == "large" else "npy"

    def write(self) -> None:
        random = np.random.default_rng(0)

        def sample(i: int) -> dict[str, Any]:
            large = self.kind == "large"
            value = random.bytes(LARGE) if large else random.integers(0, 30000, TOKENS, np.uint16)
            return {"__key__": f"{i:08d}", self.member: value}

        write_shards(map(sample, range(self.samples)), self.folder / "tar", "train", -(-self.samples // SHARDS))
        if "streaming" in LOADERS:
            from streaming import MDSWriter  # pyright: ignore[reportMissingImports]

            column = {"x": "bytes" if self.kind == "large" else "ndarray"}
            with MDSWriter(out=str(self.folder / "mds"), columns=column) as writer:
                for i in range(self.samples):
                    writer.write({"x": sample(i)[self.member]})

    def drop(self) -> None:
        """Ask the kernel to drop the files from its page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def warm(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.read_bytes()


class Recipe:
    """A recipe of tar shards whose samples have one member."""

    def __init__(self, data: Data) -> None:
        self.given = data

    def model(self) -> Any:
        raise NotImplementedError

    loss = model

    def data(self, split: str) -> Any:
        return self.given.shards if split == "train" else None

    def transform(self, sample: dict[str, Any], rng: Any) -> Any:
        return sample[self.given.member]

    def collate(self, values: list[Any]) -> Any:
        return collate(values)

    def weight(self, batch: Any) -> int:
        return len(batch)


def collate(values: list[Any]) -> Any:
    """Collate a batch, for every loader: bytes stay a list, arrays become one tensor."""
    return values if isinstance(values[0], bytes) else torch.from_numpy(np.stack(values).astype(np.int64))


def raw(data: Data, workers: int) -> Iterator[int]:
    """Read the shards in sequence, 1 MiB at a time, and yield the number of samples that the bytes are."""
    sizes = [os.path.getsize(shard) for shard in data.shards]
    for shard in data.shards:
        with open(shard, "rb", buffering=0) as file:
            while part := file.read(1 << 20):
                yield len(part) * data.samples / sum(sizes)  # pyright: ignore[reportReturnType]


def loader(data: Data, workers: int) -> Loader:
    options = DataOptions(workers=workers)
    source = open_source(Recipe(data), "train", 0, options)
    assert isinstance(source, Samples)
    order = source.order(options.lanes, options.block)
    return Loader(source, order, Split(data.batch), options, collate=collate, weight=len)


def echelon(data: Data, workers: int) -> Iterator[int]:
    for step in loader(data, workers).train(0):
        yield sum(step.weights)


def pipeline(data: Data) -> Any:
    from webdataset.compat import WebDataset

    shards = WebDataset(data.shards, shardshuffle=len(data.shards), seed=0, empty_check=False)
    samples = shards.shuffle(1000).decode().to_tuple(data.member)
    return samples.map(lambda values: values[0]).batched(data.batch, collation_fn=collate)


def web_dataset(data: Data, workers: int) -> Iterator[int]:
    from webdataset.compat import WebLoader

    for batch in WebLoader(pipeline(data), batch_size=None, num_workers=workers):
        yield len(batch)


def torchdata(data: Data, workers: int) -> Iterator[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore[reportMissingImports]

    for batch in StatefulDataLoader(pipeline(data), batch_size=None, num_workers=workers):
        yield len(batch)


def streaming(data: Data, workers: int) -> Iterator[int]:
    from streaming import StreamingDataset  # pyright: ignore[reportMissingImports]

    dataset = StreamingDataset(local=str(data.folder / "mds"), shuffle=True, batch_size=data.batch)
    loader = torch.utils.data.DataLoader(
        dataset, data.batch, num_workers=workers, collate_fn=lambda values: collate([value["x"] for value in values])
    )
    for batch in loader:
        yield len(batch)


def there(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


LOADERS: dict[str, Callable[[Data, int], Iterator[int]]] = {
    "raw": raw,
    "Echelon": echelon,
    "webdataset": web_dataset,
    **({"torchdata": torchdata} if there("torchdata", "webdataset") else {}),
    **({"streaming": streaming} if there("streaming") else {}),
}


def turn(name: str, data: Data, workers: int, cold: bool) -> float:
    """Let a loader read an epoch, and return its samples a second."""
    data.drop() if cold else data.warm()
    receive, send = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=count, args=(name, data, workers, send))
    child.start()
    try:
        while not receive.poll(0.1):
            if not child.is_alive() and not receive.poll():
                raise SystemExit(f"{name}: ended with code {child.exitcode}")
        return receive.recv()
    finally:
        with contextlib.suppress(ProcessLookupError):
            assert child.pid
            os.killpg(child.pid, signal.SIGKILL)  # with workers, some of which would wait forever for their parent
        child.join()


def count(name: str, data: Data, workers: int, send: Any) -> None:
    os.setsid()
    torch.set_num_threads(1)
    batches = LOADERS[name](data, workers)
    first = next(batches)
    began, seen = time.perf_counter(), 0
    for samples in batches:
        seen += samples
        if seen + first >= data.samples - data.batch * max(1, workers):  # the last batches of workers are uneven
            break
    send.send(seen / (time.perf_counter() - began))
    os._exit(0)  # prefetched batches are not needed


def many(folder: Path) -> Data:
    """Write ten shards whose indexes have ten million samples. All samples of a shard are the same bytes."""
    data = Data("small", folder, 10, 256)
    data.write()
    index = Index.open([Path(shard) for shard in data.shards])
    for number, shard in enumerate(index.shards):
        rows = np.repeat(index.samples(number)[:], MILLIONS // 10, axis=0)
        store(shard._replace(samples=len(rows)), rows)
    return data


def resume_s(data: Data, start: int) -> float:
    """Time the first batch at sample `start`: the index is read and checked, and a data worker started."""
    began = time.perf_counter()
    loading = loader(data, 1)
    next(loading.train(start))
    seconds = time.perf_counter() - began
    loading.close()
    return seconds


def table(data: Data, workers: int, cold: bool, turns: dict[str, list[float]]) -> tuple[list[Row], list[Goal]]:
    def ratio(one: str, other: str) -> float:
        return median_ratio(turns[one], turns[other])

    part = f"{data.kind} samples, {'cold' if cold else 'warm'}, {workers} worker(s); {len(turns['Echelon'])} rounds"
    rows = [
        {
            "part": part,
            "loader": name,
            "samples/s": statistics.median(rates),
            "of Echelon": ratio(name, "Echelon"),
            "of raw reading": ratio(name, "raw"),
            "max / min": max(rates) / min(rates),
        }
        for name, rates in turns.items()
    ]
    peers = [name for name in turns if name not in ("raw", "Echelon")]
    goals = [at_least(f"{part}: times {name}", 1, ratio("Echelon", name)) for name in peers]
    if data.kind == "large":
        goals.append(at_least(f"{part}: of raw reading", 0.9, ratio("Echelon", "raw")))
    return rows, goals


def measure(data: Data, workers: int, cold: bool, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Let all loaders read an epoch in every round, and return their samples a second."""
    turns: dict[str, list[float]] = {name: [] for name in names}
    for n in range(rounds):
        for name in names[:: -1 if n % 2 else 1]:
            turns[name].append(turn(name, data, workers, cold))
            print(data.kind, "cold" if cold else "warm", workers, name, round(turns[name][-1], 1), flush=True)
    return turns


def resume_goal(data: Data) -> Goal:
    more_s = statistics.median(resume_s(data, MILLIONS - data.batch) - resume_s(data, 0) for _ in range(5))
    name = f"resume at the last batch of {MILLIONS:,} samples, seconds more than at 0"
    return Goal(name, "under 0.5", more_s, more_s < 0.5)


def main() -> None:
    quick = "an eighth of the samples, 1 round: about half a minute"
    made = parser("data", __doc__, quick, "without it 5, or 1 if --quick")
    made.add_argument("--loaders", help=f"separated by commas, of {', '.join(LOADERS)}; without it all")
    args = made.parse_args()
    rounds, scale = args.rounds or (1 if args.quick else 5), 8 if args.quick else 1
    names = list(dict.fromkeys(["raw", "Echelon", *(args.loaders.split(",") if args.loaders else LOADERS)]))
    for name in names:
        if name not in LOADERS:
            raise ConfigError(f"--loaders {name}: no such loader is installed; {nearest(name, list(LOADERS))}")
    about = print_machine(["torch", "numpy", "webdataset", "torchdata", "mosaicml-streaming"])
    tables: list[list[Row]] = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for kind, samples, batch in (("large", 4096 // scale, 32), ("small", 100_000 // scale, 256)):
            data = Data(kind, Path(folder) / kind, samples, batch)
            data.write()
            next(echelon(data, 0))  # makes the index
            for cold, workers in itertools.product((True, False), (1, 2)):
                rows, more = table(data, workers, cold, measure(data, workers, cold, names, rounds))
                tables.append(rows)
                goals += more
        goals.append(resume_goal(many(Path(folder) / "many")))
    print()
    report(tables, goals, about, args.json)


if __name__ == "__main__":
    command(main)
