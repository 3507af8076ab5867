"""Measures how fast samples come out of tar shards, beside WebDataset, torchdata and MosaicML's streaming.

    python scripts/bench_data.py [--quick] [--rounds 5] [--loaders NAME,...] [--json FILE]

One epoch of the same samples a turn, in a process of its own, all loaders by turns in every round. Large samples are
128 KiB of random bytes, as images are to a loader that does not decode them; small ones 1024 tokens of 2 bytes, as npy.
Cold: the kernel has been asked to drop the files from its page cache before the turn. Counted are the samples after the
first batch, so no loader's start. A loader that is not installed has no row.
"""

import contextlib
import importlib.util
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
from bench_report import Goal, Row, machine, parser, report

from trainer.config.options import DataOptions
from trainer.data.batch import Split
from trainer.data.loader import Loader
from trainer.data.shards.index import Index
from trainer.data.shards.index_file import store
from trainer.data.shards.writer import write_shards
from trainer.data.source import Samples, open_source

LARGE, TOKENS, SHARDS = 128 << 10, 1024, 16
MILLIONS = 10_000_000


@dataclass(frozen=True)
class Data:
    """Samples of one kind, as tar shards and, where there is a way to write it, as MDS."""

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
        """From the page cache."""
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
    """Of tar shards; a sample is its one member."""

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
    """Every loader's: bytes stay a list, arrays become one."""
    return values if isinstance(values[0], bytes) else torch.from_numpy(np.stack(values).astype(np.int64))


def raw(data: Data, workers: int) -> Iterator[int]:
    """Bytes in sequence, 1 MiB at a time, as the number of samples they are."""
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
    import webdataset

    shards = webdataset.WebDataset(data.shards, shardshuffle=len(data.shards), seed=0, empty_check=False)
    samples = shards.shuffle(1000).decode().to_tuple(data.member)
    return samples.map(lambda values: values[0]).batched(data.batch, collation_fn=collate)


def web_dataset(data: Data, workers: int) -> Iterator[int]:
    import webdataset

    for batch in webdataset.WebLoader(pipeline(data), batch_size=None, num_workers=workers):
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
    """Samples a second."""
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
        child.join()
        with contextlib.suppress(ProcessLookupError):
            assert child.pid
            os.killpg(child.pid, signal.SIGKILL)  # workers that wait for ever for their parent


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
    os._exit(0)  # what is read ahead is not wanted


def many(folder: Path) -> Data:
    """Ten million samples by the indexes of ten shards; in each shard all are the same bytes."""
    data = Data("small", folder, 10, 256)
    data.write()
    index = Index.open([Path(shard) for shard in data.shards])
    for number, shard in enumerate(index.shards):
        rows = np.repeat(index.samples(number)[:], MILLIONS // 10, axis=0)
        store(shard._replace(samples=len(rows)), rows)
    return data


def resume_s(data: Data, start: int) -> float:
    """From nothing to the first batch at sample `start`: the index is read and checked, a data worker started."""
    began = time.perf_counter()
    loading = loader(data, 1)
    next(loading.train(start))
    seconds = time.perf_counter() - began
    loading.close()
    return seconds


def table(data: Data, workers: int, cold: bool, turns: dict[str, list[float]]) -> tuple[list[Row], list[Goal]]:
    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(turns[one], turns[other], strict=True))

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
    goals = [Goal(f"{part}: times {name}", "at least 1", (r := ratio("Echelon", name)), r >= 1) for name in peers]
    if data.kind == "large":
        of_raw = ratio("Echelon", "raw")
        goals.append(Goal(f"{part}: of raw reading", "at least 0.9", of_raw, of_raw >= 0.9))
    return rows, goals


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int)
    made.add_argument("--loaders", help="by comma; all that are installed where not told")
    args = made.parse_args()
    rounds, scale = args.rounds or (1 if args.quick else 5), 8 if args.quick else 1
    names = list(dict.fromkeys(["raw", "Echelon", *(args.loaders.split(",") if args.loaders else LOADERS)]))
    if unknown := set(names) - LOADERS.keys():
        raise SystemExit(f"--loaders: no {', '.join(unknown)} here; there are {', '.join(LOADERS)}")
    about = machine(["torch", "numpy", "webdataset", *filter(there, ("torchdata", "streaming"))])
    print(*(f"{key} {value}" for key, value in about.items()), sep=", ", end="\n\n")
    tables: list[list[Row]] = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for kind, samples, batch in (("large", 4096 // scale, 32), ("small", 100_000 // scale, 256)):
            data = Data(kind, Path(folder) / kind, samples, batch)
            data.write()
            next(echelon(data, 0))  # makes the index
            for cold in (True, False):
                for workers in (1, 2):
                    turns: dict[str, list[float]] = {name: [] for name in names}
                    for n in range(rounds):
                        for name in names[:: -1 if n % 2 else 1]:
                            turns[name].append(turn(name, data, workers, cold))
                            print(
                                kind, "cold" if cold else "warm", workers, name, round(turns[name][-1], 1), flush=True
                            )
                    rows, missed_or_met = table(data, workers, cold, turns)
                    tables.append(rows)
                    goals += missed_or_met
        data = many(Path(folder) / "many")
        more_s = statistics.median(resume_s(data, MILLIONS - data.batch) - resume_s(data, 0) for _ in range(5))
    goals.append(
        Goal(
            "resume at the last batch of 10,000,000 samples, seconds more than at 0", "under 0.5", more_s, more_s < 0.5
        )
    )
    print()
    report(tables, goals, about, args.json)


if __name__ == "__main__":
    main()
